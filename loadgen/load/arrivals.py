"""When requests are sent: generators of absolute times, which know nothing of sending.

Open loop: a time depends on nothing that the server does, so a slow server cannot slow its own load. An
arrival process is two things. A renewal process at rate 1 says how bursty it is; a rate profile says how
the rate goes over time, and its inverse integral maps the one onto the other. So every burstiness goes
with every profile.
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
    """`seconds` during which the rate goes from `first` to `last` requests a second: in a straight line,
    or with `exponential` by a constant factor a second."""

    seconds: float
    first: float
    last: float
    exponential: bool = False

    @classmethod
    def parse(cls, text: str) -> Stage:
        """`60:5` holds 5/s for a minute, `60:5-20` goes there in a line, `60:5~20` exponentially."""
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
        """How many requests it sends on average."""
        if self.first == self.last:
            return self.first * self.seconds
        if self.exponential:
            return (self.last - self.first) * self.seconds / math.log(self.last / self.first)
        return (self.first + self.last) / 2 * self.seconds

    def when(self, sent: float) -> float:
        """After how many seconds `sent` requests are expected to have been sent; `sent` <= `expected`."""
        if self.first == self.last:
            return sent / self.first
        if self.exponential:
            growth = math.log(self.last / self.first)
            return self.seconds / growth * math.log1p(sent * growth / (self.first * self.seconds))
        slope = (self.last - self.first) / self.seconds
        # The root of slope/2 t^2 + first t = sent that does not lose its digits when slope is small.
        return 2 * sent / (self.first + math.sqrt(max(0.0, self.first**2 + 2 * slope * sent)))


def steady(rate: float) -> tuple[Stage, ...]:
    """One rate for ever."""
    return (Stage(math.inf, rate, rate),)


def unit_times(burstiness: float, seed: int) -> Iterator[float]:
    """Times of a renewal process at rate 1, the first at once, without end.

    Gaps are gamma with shape `burstiness` and mean 1, as vLLM means it: 1 is Poisson, less is burstier,
    more is more even, `inf` is a metronome.
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
    """Seconds from the start, ascending, as long as the stages last."""
    times = unit_times(burstiness, seed)
    begun = sent = last = 0.0
    now = next(times)
    for stage in stages:
        while now - sent < stage.expected:
            last = max(last, begun + stage.when(now - sent))  # rounding must not turn time back
            yield last
            now = next(times)
        begun += stage.seconds
        sent += stage.expected
