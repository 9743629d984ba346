"""The raw result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadgen.common.record import Record


@dataclass(frozen=True, slots=True)
class Measured:
    """All records of a run ordered by due time, and the state of its processes."""

    records: list[Record]
    # The run's second 0, on the wall clock and on the machine's monotonic clock.
    started_at: float
    started_monotonic: float
    processes: list[dict[str, Any]]
    stopped: bool
