"""Flatness of a process's memory while it serves: a leak shows, an allocator's jump does not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Sample:
    """Memory of a process after a number of requests."""

    requests: int
    kib: int


@dataclass(frozen=True)
class Flat:
    """The criterion, for samples taken after a warm-up."""

    # Over the last three fifths: the median of the slopes between any two samples (Theil and Sen), which up
    # to a quarter of the samples cannot move far.
    kib_a_request: float = 0.5
    # From the first sample to the median of the last fifth, as a share of the first.
    growth: float = 0.03

    def broken_by(self, samples: Sequence[Sample]) -> list[str]:
        """The sequences of samples that are not flat; empty where all are."""
        found = []
        if (steep := slope(samples)) > self.kib_a_request:
            found.append(f"{steep:.2f} KiB a request")
        if (grown := growth(samples)) > self.growth:
            found.append(f"{grown:.1%} more")
        return found


def slope(samples: Sequence[Sample]) -> float:
    """KiB a request of the last three fifths."""
    late = samples[len(samples) * 2 // 5 :]
    return statistics.median(
        (after.kib - before.kib) / (after.requests - before.requests)
        for before, after in combinations(late, 2)
    )


def growth(samples: Sequence[Sample]) -> float:
    """Growth over all samples, as a share of the first."""
    last = statistics.median(sample.kib for sample in samples[-max(1, len(samples) // 5) :])
    return last / samples[0].kib - 1
