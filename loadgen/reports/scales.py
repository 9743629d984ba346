"""Axis scales and their tick values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to [0, 1], linearly or logarithmically."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """The position of a value; values outside are at the ends."""
        if self.log:
            value, low, high = (math.log(max(one, 1e-12)) for one in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self, about: int = 5) -> list[float]:
        """Returns about `about` round values between the ends."""
        return self._log_ticks(about) if self.log else self._linear_ticks(about)

    def _linear_ticks(self, about: int) -> list[float]:
        raw = (self.high - self.low) / max(1, about)
        if raw <= 0:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(one * power for one in _STEPS if one * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(place * step, 12) for place in range(first, last + 1)]

    def _log_ticks(self, about: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for parts in ((1, 2, 5), (1, 3), (1,)):
            ticks = [part * 10.0**power for power in range(first, last + 1) for part in parts]
            inside = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(inside) <= about + 2:
                break
        return inside


def around(values: Sequence[float], *, zero: bool = True) -> Scale:
    """A linear scale that contains all values, from 0 on with `zero`."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if zero:
        low = min(0.0, low)
    if high <= low:
        high = low + 1.0
    return Scale(low, high + (high - low) * 0.05)


def around_log(values: Sequence[float]) -> Scale:
    """A logarithmic scale of the positive values; at least a factor of 3 wide."""
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = min(positive) * 0.9, max(positive) * 1.1
    if high < 3 * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(3), middle * math.sqrt(3)
    return Scale(low, high, log=True)
