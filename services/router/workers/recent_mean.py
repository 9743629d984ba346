"""An exponentially weighted mean over about the last requests of all processes of a router."""

from __future__ import annotations

from typing import NamedTuple

# How many requests it is over by default: a single one has an error of some percent, since others come and
# go.
REQUESTS = 128
# What a single request may say of a worker's pace at most: some are stalled, or their clients are.
_LEAST, _MOST = 0.8, 1.25


class Sum(NamedTuple):
    """The values that one process has observed since its start: their number, and their sum."""

    number: int = 0
    total: float = 0.0


class RecentMean:
    """The mean over about the last `requests`. Starts at `value`, which counts as `count` observations; the
    first ones after it are averaged equally.

    All processes of a router have the same mean: each reports `own`, which only grows, and takes what is new
    in those of its siblings. So a report that is lost is made up for by the next one, and a process that
    starts takes what the others have observed.
    """

    def __init__(self, value: float = 0.0, count: int = 0, requests: int = REQUESTS) -> None:
        self.value = value
        self.own = Sum()
        self._count = count
        self._requests = requests
        self._taken: dict[int, Sum] = {}

    def observe(self, value: float) -> None:
        """Takes the value of one more request of this process."""
        self._add(value)
        self.own = Sum(self.own.number + 1, self.own.total + value)

    def take(self, sibling: int, reported: Sum) -> None:
        """Takes the sum that a sibling process reports; one of fewer requests than before is of a process
        that has replaced it."""
        taken = self._taken.get(sibling, Sum())
        if reported.number < taken.number:
            taken = Sum()
        self._taken[sibling] = reported
        if number := reported.number - taken.number:
            self._add((reported.total - taken.total) / number, number)

    def _add(self, value: float, number: int = 1) -> None:
        """Adds `number` observations with mean `value`."""
        while number and self._count < self._requests:
            number -= 1
            self._count += 1
            self.value += (value - self.value) / self._count
        self.value += (value - self.value) * (1 - (1 - 1 / self._requests) ** number)


class TpotRatio(RecentMean):
    """The ratio of measured to predicted time per output token, of recent requests that ended at a worker; 1
    counts as some of the first ones.

    A worker reports the durations of its steps. What a client sees between two tokens is longer by what lies
    in between, and a step's duration is not quite linear in what it computes, which predictions take it to
    be.
    """

    def __init__(self) -> None:
        super().__init__(1.0, REQUESTS // 8)

    def ended(self, measured_s: float, predicted_s: float) -> None:
        """Records a request that had a token every `measured_s` seconds on average, where `predicted_s`
        (above 0) were predicted."""
        self.observe(min(_MOST, max(_LEAST, measured_s / predicted_s)))
