"""Arrival times, lengths and cancellations of sequences; the same for the same seed. Torch-free."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.case import DecodeCase, EngineSize

SHORTEST, LONGEST, MEAN = 16, 256, 96
CANCELLED = 0.1
_SAMPLE = 20_000
# Before so many, a pace is not judged.
_PACED_STEPS = 50


@dataclass(frozen=True, slots=True)
class Join:
    """One sequence. `at`: its arrival in steps from the start; `cancel_after`: steps, or None."""

    number: int
    at: float
    output: int
    cancel_after: int | None

    @property
    def steps(self) -> int:
        """The number of steps for which it has a slot; its first token exists when it joins."""
        return self.output - 1 if self.cancel_after is None else self.cancel_after


def _length(draw: random.Random) -> int:
    """Geometric beyond the minimum, cut at the maximum."""
    beyond = math.floor(-math.log(1 - draw.random()) * (MEAN - SHORTEST))
    return min(LONGEST, SHORTEST + beyond)


def _join(draw: random.Random, number: int, at: float) -> Join:
    output = _length(draw)
    cancelled = draw.random() < CANCELLED
    return Join(number, at, output, draw.randrange(1, output - 1) if cancelled else None)


def mean_steps() -> float:
    """The mean number of steps for which a sequence has its slot."""
    draw = random.Random(0)
    return sum(_join(draw, 0, 0.0).steps for _ in range(_SAMPLE)) / _SAMPLE


def mean_age() -> float:
    """The mean number of steps for which a sequence has had its slot at a random time."""
    draw = random.Random(0)
    stays = [_join(draw, 0, 0.0).steps for _ in range(_SAMPLE)]
    return sum(stay * stay for stay in stays) / sum(stays) / 2


def slots_for(batch: int) -> int:
    """Slots of which `batch` are busy on average, with 3 standard deviations of headroom."""
    return batch + math.ceil(3 * math.sqrt(batch))


def engine_size(cases: list[DecodeCase]) -> EngineSize:
    """The size of an engine for arriving and ending sequences."""
    return EngineSize(slots_for(max(case.batch for case in cases)), cases[0].context + LONGEST + 1)


def joins(seed: int, rate: float) -> Iterator[Join]:
    """An endless Poisson process of `rate` per step."""
    draw, at, number = random.Random(seed), 0.0, 0
    while True:
        at += draw.expovariate(rate)
        yield _join(draw, number, at)
        number += 1


class StepTime:
    """Time in steps, interpolated between steps at the average pace so far.

    Arrivals planned in it keep a batch busy for any step time, and occur at any point of a step.
    """

    def __init__(self, now: float, steps: int, pace: float) -> None:
        """`steps`: counted by `now`, in seconds; `pace`: steps a second, to begin with."""
        self._begun = self._last = now
        self._first = steps
        self._pace = pace
        self._at = 0.0

    def at(self, now: float, steps: int) -> float:
        """The time so far in steps, which never goes back."""
        self._at += (now - self._last) * self._pace
        self._last = now
        if steps - self._first > _PACED_STEPS:
            self._pace = (steps - self._first) / (now - self._begun)
        return self._at


def standing(seed: int, batch: int) -> list[Join]:
    """The initial sequences, at random points of their lifetimes, so that they do not end together."""
    draw = random.Random(seed)
    found: list[Join] = []
    while len(found) < batch:
        join = _join(draw, -1 - len(found), 0.0)
        # Long ones are likelier to be met, and have any part of their stay left.
        if draw.random() * LONGEST < join.steps:
            left = draw.randrange(1, join.steps + 1)
            found.append(Join(join.number, 0.0, left + 1, None))
    return found


class Due:
    """A plan's joins, at their times."""

    def __init__(self, plan: Iterator[Join]) -> None:
        self._plan = plan
        self._next = next(plan)

    def until(self, at: float) -> Iterator[Join]:
        """The joins that are due since the last call."""
        while self._next.at <= at:
            yield self._next
            self._next = next(self._plan)
