"""Queues whose truth is known: attainment at any rate, and so the goodput, by formula.

`MG1` is one server that takes requests in the order in which they come, with service times of a few fixed
lengths (one length: M/D/1). Its wait has the distribution of a geometric number of residual service times
(Pollaczek and Khinchine), which is summed on a grid. `Cliff` is a server that is fast until a number of
requests came within the last second, and hopeless after: the count is Poisson.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
_CELLS = 400


class Queue(Protocol):
    """Requests in, and which of them met the limit."""

    def attainment(self, rate: float) -> float:
        """The share that meets the limit, in the long run."""

    def run(self, rate: float, seconds: float, seed: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Simulates from an empty server on: times when requests were due, times when they ended, and which
        were good."""


@dataclass(frozen=True)
class MG1:
    """Service times (s) and their probabilities; good is a request that ends within `limit` s."""

    service: tuple[float, ...]
    shares: tuple[float, ...]
    limit: float

    @property
    def mean(self) -> float:
        return float(np.dot(self.service, self.shares))

    def attainment(self, rate: float) -> float:
        load = rate * self.mean
        if load >= 1:
            return 0.0
        step = self.limit / _CELLS
        middles = (np.arange(_CELLS) + 0.5) * step
        alive = sum(p * (np.asarray(s) > middles) for s, p in zip(self.service, self.shares, strict=True))
        residual = np.asarray(alive) / self.mean * step
        # Each cell's mass stands at its two ends.
        ends = np.concatenate([residual, [0.0]]) / 2 + np.concatenate([[0.0], residual]) / 2
        waits = np.zeros(_CELLS + 1)
        waits[0] = (1 - load) / (1 - load * ends[0])
        for cell in range(1, _CELLS + 1):
            passed = float(np.dot(ends[1 : cell + 1], waits[cell - 1 :: -1]))
            waits[cell] = load * passed / (1 - load * ends[0])
        within = np.cumsum(waits)
        return sum(
            p * float(within[round((self.limit - s) / step)])
            for s, p in zip(self.service, self.shares, strict=True)
            if s <= self.limit
        )

    def run(self, rate: float, seconds: float, seed: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        random = np.random.default_rng([seed, int(rate * 1e6)])
        count = max(2, int(random.poisson(rate * seconds)))
        due = np.cumsum(random.exponential(1 / rate, count))
        service = random.choice(self.service, count, p=self.shares)
        # Lindley's recursion, unrolled.
        sums = np.concatenate([[0.0], np.cumsum(service[:-1] - np.diff(due))])
        latency = sums - np.minimum.accumulate(sums) + service
        return due, due + latency, latency <= self.limit


@dataclass(frozen=True)
class Cliff:
    """Fast until `most` requests came within the last second."""

    most: int

    def attainment(self, rate: float) -> float:
        return float(stats.poisson.cdf(self.most - 1, rate))

    def run(self, rate: float, seconds: float, seed: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        random = np.random.default_rng([seed, int(rate * 1e6)])
        due = np.cumsum(random.exponential(1 / rate, max(2, int(random.poisson(rate * seconds)))))
        recent = np.arange(len(due)) - np.searchsorted(due, due - 1.0)
        latency = np.where(recent < self.most, 0.05, 5.0)
        return due, due + latency, recent < self.most


def goodput(queue: Queue, goal: float) -> float:
    """The highest rate whose attainment is `goal`, by bisection."""
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if queue.attainment(middle) >= goal else (low, middle)
    return low


SERVICE_S = 0.01
MD1 = MG1((SERVICE_S,), (1.0,), 5 * SERVICE_S)
MIXED = MG1((0.5 * SERVICE_S, 3 * SERVICE_S), (0.8, 0.2), 8 * SERVICE_S)
# The limit is so loose that the queue's capacity is what limits it.
LOOSE = MG1((SERVICE_S,), (1.0,), 50 * SERVICE_S)
CLIFF = Cliff(50)
