"""Finds the highest rate that passes in few trials: steps of 25 %, three at once at first."""

from __future__ import annotations

from collections.abc import Callable

STEP = 1.25
# Three steps: about twice the rate.
_STRIDE = 3
_LOWEST, _HIGHEST = -12, 40


def highest(start: float, holds: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """The highest of the rates start · 1.25ᵏ that passes, and the next one, which fails.

    (None, the lowest that was tried) where none passes; (the highest that was tried, None) where all do.
    """
    below, above = 0, 0
    if holds(start):
        while above == below:
            above = min(_HIGHEST, below + _STRIDE)
            if above == below:
                return start * STEP**below, None
            if holds(start * STEP**above):
                below = above
    else:
        while above == below:
            below = max(_LOWEST, above - _STRIDE)
            if above == below:
                return None, start * STEP**above
            if not holds(start * STEP**below):
                above = below
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if holds(start * STEP**middle) else (below, middle)
    return start * STEP**below, start * STEP**above
