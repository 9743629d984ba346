"""What a chunk of a prompt costs, and how long a step of such chunks takes. Torch-free.

A row costs 1 unit, and attention as much again for every `half_context` tokens that the row attends to. A
model's arithmetic gives that point: its products take 2 operations a weight and row, its attention 4 a
layer, query head dimension and token attended to. How long a unit takes is measured while the worker runs,
and so is how much slower than by that arithmetic attention is: else steps far into a long prompt, which are
mostly attention, would make short prompts look dear.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

# What is measured is the median of so many steps: the first of all compiles, and a host is sometimes slow.
_STEPS_KEPT = 9
# How many times slower or faster than by its arithmetic attention may be thought.
_SLOWEST, _FASTEST = 16.0, 0.7
# The share of its rows from which on attention counts as much of a step. A step measures attention where by
# arithmetic it has as much. What was learned must have no say in this: too low a value would then keep away
# the steps that correct it.
ATTENTION_SHARE = 1 / 4
# Rows that take a GPU no longer than one: its arithmetic is as fast as its memory's reading of the weights.
LEAST_ROWS_GPU = 224

# (first position, rows) of a chunk.
Run = tuple[int, int]


class TimedPass(NamedTuple):
    """Rows of a step from a prompt's beginning on, and what it took."""

    rows: int
    seconds: float


class PrefillCost:
    """Units of chunks, and seconds a unit."""

    def __init__(self, half_context: float = math.inf, least_rows: int = 0) -> None:
        """`half_context`: tokens of context at which attention takes as long as the products. `least_rows`: a
        step of fewer takes as long, as far as is known before `begin`."""
        self._half_context = half_context
        self.least_rows = least_rows
        self._unit_times: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._slowness: deque[float] = deque(maxlen=_STEPS_KEPT)
        # What steps of few rows took beside a decode step in them, which reads the weights in any case.
        self._few_mixed: deque[float] = deque(maxlen=_STEPS_KEPT)

    def begin(self, few: TimedPass, most: TimedPass) -> None:
        """Records steps timed at start-up: one of few rows, and one of the most rows that a step has.

        The host launches a step of few rows no faster than one of many. So a unit measured with small prompts
        alone would overestimate the cost of a row, which makes steps smaller, and the overestimate larger.
        """
        unit_s = most.seconds / most.rows
        self._unit_times.append(unit_s)
        self.least_rows = min(max(self.least_rows, int(few.seconds / unit_s)), most.rows)

    def of(self, start: int, count: int) -> float:
        """Units of tokens `start` to `start + count` of a sequence."""
        return count + count * (start + count / 2) / self.half_context

    def of_step(self, chunks: Iterable[Run]) -> float:
        """Units of a step of them."""
        rows, context = self._shares(chunks)
        return rows + context * self.attention

    def tokens_within(self, start: int, units: float) -> int:
        """The most tokens from `start` on that cost at most `units`."""
        half = self.half_context
        if math.isinf(half) or math.isinf(units):
            return int(min(units, 2**31))
        slope = 1 + start / half
        return int(half * (math.sqrt(slope * slope + 2 * units / half) - slope))

    def units_within(self, seconds: float) -> float:
        """The units that take so long; no bound before anything was measured."""
        unit_s = self.unit_s
        return seconds / unit_s if unit_s > 0 else math.inf

    def seconds_of(self, units: float) -> float:
        """Predicted seconds of so many units; 0 before anything was measured."""
        return units * self.unit_s

    def seconds_of_step(self, chunks: Sequence[Run], *, mixed: bool = False) -> float:
        """Predicted seconds of a step of them; `mixed`: beyond those of a decode step that is part of it."""
        if mixed and self._few_mixed and _rows(chunks) <= self.least_rows:
            return median(self._few_mixed)
        return self.seconds_of(self.of_step(chunks))

    @property
    def few_rows_s(self) -> float:
        """Predicted seconds of a step of few rows, of the kind that ran last."""
        return median(self._few_mixed) if self._few_mixed else self.seconds_of(self.least_rows)

    def took(self, chunks: Sequence[Run], seconds: float, *, mixed: bool = False) -> None:
        """Records the duration of a step, `mixed`: beyond that of a decode step that was part of it. It
        counts as a measurement of attention where the step has much of that, else of rows, unless it has so
        few that it took as long with fewer."""
        if mixed and _rows(chunks) <= self.least_rows:
            self._few_mixed.append(seconds)
            return
        rows, context = self._shares(chunks)
        unit_s = self.unit_s
        if unit_s and context > rows * ATTENTION_SHARE:
            slowness = (seconds / unit_s - rows) / context
            self._slowness.append(min(max(slowness, _FASTEST), _SLOWEST))
        elif not unit_s or rows > self.least_rows:
            self._unit_times.append(seconds / (rows + context * self.attention))

    def _shares(self, chunks: Iterable[Run]) -> tuple[float, float]:
        """Units of a step's rows, and by arithmetic of its attention."""
        rows, context = 0, 0.0
        for start, count in chunks:
            rows += count
            context += count * (start + count / 2) / self._half_context
        return max(rows, self.least_rows), context

    @property
    def unit_s(self) -> float:
        """Seconds that a row takes, as measured; 0 before any was."""
        return median(self._unit_times) if self._unit_times else 0.0

    @property
    def attention(self) -> float:
        """How many times slower than by its arithmetic attention is, as measured."""
        return median(self._slowness) if self._slowness else 1.0

    @property
    def half_context(self) -> float:
        """Tokens of context at which attention takes as long as the products, as measured."""
        return self._half_context / self.attention


def _rows(chunks: Iterable[Run]) -> int:
    return sum(count for _, count in chunks)
