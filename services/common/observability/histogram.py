"""A histogram fine enough for quantiles and cheap enough for an observation with each message.

There are 24 bounds in each decade, about 10 % apart, so a quantile is accurate to 5 %. Prometheus gets the
coarser `EXPORTED` bounds, which are among them. The quantiles of a time window are those of the difference
of two snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_STEPS = (
    *(1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0, 2.2, 2.5, 2.7, 3.0),
    *(3.3, 3.6, 3.9, 4.3, 4.7, 5.0, 5.6, 6.2, 6.8, 7.5, 8.2, 9.1),
)

SECONDS = tuple(float(f"{step}e{decade}") for decade in range(-6, 3) for step in _STEPS)
"""Bounds for times: 1 µs to 910 s; longer times are in the last, open bucket."""

TOKENS = tuple(float(f"{step}e{decade}") for decade in range(7) for step in _STEPS)
"""Bounds for counts: 1 to 9.1 million."""

EXPORTED_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0),
)
EXPORTED_TOKENS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0, 30000.0, 100000.0, 1000000.0)


class Histogram:
    """Counts of observations by bucket, and their sum. One thread may write, any may read."""

    __slots__ = ("bounds", "counts", "exported", "sum")

    def __init__(
        self, bounds: Sequence[float] = SECONDS, exported: Sequence[float] = EXPORTED_SECONDS
    ) -> None:
        self.bounds = bounds
        self.exported = exported
        # counts[i]: observations above bounds[i - 1] and up to bounds[i]; the last bucket is open.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value; one below the first bound is in the first bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observations in all buckets."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Pairs (bound, observations up to it) of each exported bound, then for infinity."""
        running = list(accumulate(self.counts))
        pairs = [(bound, running[bisect_left(self.bounds, bound)]) for bound in self.exported]
        return [*pairs, (float("inf"), running[-1])]


def tokens_histogram() -> Histogram:
    """A histogram of token counts."""
    return Histogram(TOKENS, EXPORTED_TOKENS)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value that a `share` of the observations do not exceed, accurate to a bucket's width; 0 without
    observations. `counts`: those of a histogram, or the difference of two of its snapshots."""
    rank = share * sum(counts)
    if rank == 0:
        return 0.0
    seen = 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return _middle(bounds, index)
    return bounds[-1]


def _middle(bounds: Sequence[float], index: int) -> float:
    if index == len(bounds):
        return bounds[-1]
    return (bounds[index - 1] + bounds[index]) / 2 if index else bounds[0]
