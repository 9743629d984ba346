"""Which workload a run's settings ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.load.workload import SyntheticWorkload

if TYPE_CHECKING:
    from loadgen.load.workload import Workload
    from loadgen.settings import Settings


def workload_of(settings: Settings) -> Workload:
    """Synthetic prompts."""
    return SyntheticWorkload(settings)


def recorded_times(settings: Settings) -> Iterator[float] | None:
    """The times of a trace; None where there is none."""
    return None
