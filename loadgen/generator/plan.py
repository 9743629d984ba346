"""The start time of each conversation of a run, restricted to one process.

Every process computes the same plan from the same settings and takes every n-th conversation of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.common.settings import LoadSettings
from loadgen.load.arrivals import Stage, arrivals, steady


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a plan that one process sends: every `of`-th conversation, from number `process` on."""

    process: int = 0
    of: int = 1

    def concurrency(self, whole: int) -> int:
        """This process's part of a closed loop."""
        return whole // self.of + (self.process < whole % self.of)


def open_times(load: LoadSettings, recorded: Iterator[float] | None = None) -> Iterator[float]:
    """Start times in seconds of every conversation of the run; `recorded` are a trace's."""
    if recorded is not None:
        times = recorded
    elif load.stages:
        times = arrivals([Stage.parse(one) for one in load.stages], load.burstiness, load.seed)
    else:
        assert load.rate is not None
        times = arrivals(steady(load.rate), load.burstiness, load.seed)
    if load.duration_s is not None:
        end = load.duration_s
        times = itertools.takewhile(lambda time: time < end, times)
    return itertools.islice(times, load.num_requests)


def numbers_of(load: LoadSettings, share: Share) -> Iterator[int]:
    """The numbers of this process's conversations in a closed loop; infinite where only a duration ends
    it."""
    numbers = itertools.count() if load.num_requests is None else range(load.num_requests)
    return itertools.islice(numbers, share.process, None, share.of)
