"""What a whole run brought."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadgen.common.record import Record

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run brought: every record, by the time it was due, and how its processes fared."""

    records: list[Record]
    # The run's second 0, on the wall's clock and on the machine's monotonic one.
    started_at: float
    started_monotonic: float
    processes: list[dict[str, Any]]
    stopped: bool
