"""Arrival processes: generators of absolute send times, independent of the server.

In an open loop a slow server cannot slow its own load. An arrival process has two parts: a renewal process at
rate 1, which defines the burstiness, and a rate profile, whose inverse integral maps the one onto the other.
So every burstiness can be combined with every profile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.common.errors import LoadgenError

_DRAWN_AT_ONCE = 1024
_STAGE = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(?:([-~])(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Stage:
    """`seconds` during which the rate changes from `first` to `last` requests per second: linearly, or with
    `exponential` by a constant factor per second.
    """

    seconds: float
    first: float
    last: float
    exponential: bool = False

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Parses `60:5` (constant for a minute), `60:5-20` (linear), `60:5~20` (exponential)."""
        match = _STAGE.fullmatch(text)
        if match is None:
            raise LoadgenError(f"{text!r} is no stage (SECONDS:RATE, SECONDS:FROM-TO or SECONDS:FROM~TO)")
        seconds, first, shape, last = match.groups()
        stage = cls(float(seconds), float(first), float(last or first), shape == "~")
        if stage.seconds <= 0 or (stage.exponential and min(stage.first, stage.last) <= 0):
            raise LoadgenError(f"{text!r}: seconds, and the rates of an exponential, must be positive")
        return stage

    @property
    def expected(self) -> float:
        """The expected number of requests."""
        if self.first == self.last:
            return self.first * self.seconds
        if self.exponential:
            return (self.last - self.first) * self.seconds / math.log(self.last / self.first)
        return (self.first + self.last) / 2 * self.seconds

    def when(self, sent: float) -> float:
        """Seconds until `sent` requests are expected; `sent` <= `expected`."""
        if self.first == self.last:
            return sent / self.first
        if self.exponential:
            growth = math.log(self.last / self.first)
            return self.seconds / growth * math.log1p(sent * growth / (self.first * self.seconds))
        slope = (self.last - self.first) / self.seconds
        # The root of slope/2 t^2 + first t = sent in a form that is precise for a small slope.
        return 2 * sent / (self.first + math.sqrt(max(0.0, self.first**2 + 2 * slope * sent)))


def steady(rate: float) -> tuple[Stage, ...]:
    """An endless stage of constant rate."""
    return (Stage(math.inf, rate, rate),)


def unit_times(burstiness: float, seed: int) -> Iterator[float]:
    """Times of an endless renewal process at rate 1; the first is 0.

    Gaps are gamma with shape `burstiness` and mean 1, as in vLLM: 1 is Poisson, less is burstier, `inf` is
    evenly spaced.
    """
    random = np.random.default_rng([seed, 0])
    now = 0.0
    while True:
        if math.isinf(burstiness):
            gaps = np.ones(_DRAWN_AT_ONCE)
        else:
            gaps = random.gamma(burstiness, 1.0 / burstiness, _DRAWN_AT_ONCE)
        for gap in gaps.tolist():
            yield now
            now += gap


def arrivals(stages: Sequence[Stage], burstiness: float, seed: int) -> Iterator[float]:
    """Send times in seconds from the start, ascending, until the stages end."""
    times = unit_times(burstiness, seed)
    begun = sent = last = 0.0
    now = next(times)
    for stage in stages:
        while now - sent < stage.expected:
            last = max(last, begun + stage.when(now - sent))  # rounding must not decrease the time
            yield last
            now = next(times)
        begun += stage.seconds
        sent += stage.expected
