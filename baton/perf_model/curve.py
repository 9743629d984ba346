"""Piecewise linear curves, evaluated without numpy: one point at a time that is several times faster."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Curve(NamedTuple):
    """Values at ascending points, linear between them and constant outside; zero everywhere by default."""

    at: tuple[float, ...] = (1.0,)
    values: tuple[float, ...] = (0.0,)

    def value(self, x: float) -> float:
        """The interpolated value at `x`."""
        at, values = self
        above = bisect_right(at, x)
        if above == 0:
            return values[0]
        if above == len(at):
            return values[-1]
        low, value = at[above - 1], values[above - 1]
        return value + (x - low) / (at[above] - low) * (values[above] - value)

    def extended(self, x: float) -> float:
        """The value at `x`, beyond the last point with the slope of the last two."""
        at, values = self
        if x <= at[-1] or len(at) < 2:
            return self.value(x)
        return values[-1] + (x - at[-1]) / (at[-1] - at[-2]) * (values[-1] - values[-2])

    @property
    def slope(self) -> float:
        """The mean slope from the first point to the last; 0 with a single point."""
        at, values = self
        return (values[-1] - values[0]) / (at[-1] - at[0]) if len(at) > 1 else 0.0

    def scaled(self, factor: float) -> Curve:
        """A curve of the same points whose values are `factor` times as large."""
        return Curve(self.at, tuple(factor * value for value in self.values))


NO_CURVE = Curve()
