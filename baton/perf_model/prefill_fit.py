"""Fits the costs of prefill steps to measured ones. Torch-free.

In units a row costs 1, and attention as much again for every `half_context` tokens that the row attends to. A
model's arithmetic gives that point: its products take 2 operations a weight and row, its attention 4 a
layer, query head dimension and token attended to. How long a unit takes is measured while the worker runs,
and so is how much slower than by that arithmetic attention is: else steps far into a long prompt, which are
mostly attention, would make short prompts look dear.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from baton.perf_model.step_costs import Chunk, StepCosts, attended

# A measurement is the median of this many steps: the first of all compiles, and a host is sometimes slow.
_STEPS_KEPT = 9
# How many times slower or faster than by its arithmetic attention may be thought.
_SLOWEST, _FASTEST = 16.0, 0.7
# The share of its rows from which on attention counts as much of a step. A step measures attention where by
# arithmetic it has as much. What was learned must have no say in this: too low a value would then keep away
# the steps that correct it.
ATTENTION_SHARE = 1 / 4
# Rows that take a GPU no longer than one: its arithmetic is as fast as its memory's reading of the weights.
LEAST_ROWS_GPU = 224


class TimedPass(NamedTuple):
    """Rows of a step from a prompt's beginning on, and what it took."""

    rows: int
    seconds: float


class PrefillFit:
    """Units of chunks, and seconds a unit, as measured. `unit_s`: seconds that a row takes; 0 before any was
    measured. `attention`: how many times slower than by its arithmetic attention is. `half_context`: tokens
    of context at which attention takes as long as the products. `busy_rows`: rows of a step from which on
    arithmetic takes longer than reading the weights, by the model's sizes alone."""

    def __init__(self, half_context: float = math.inf, least_rows: int = 0) -> None:
        """`half_context`: by arithmetic. `least_rows`: a step of fewer takes as long, as far as is known
        before `begin`."""
        self._half_context = half_context
        self.least_rows = self.busy_rows = least_rows
        self._unit_times: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._slowness: deque[float] = deque(maxlen=_STEPS_KEPT)
        # What whole steps of few rows took, and what they took beside a decode step in them, which reads the
        # weights in any case.
        self._few_whole: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._few_mixed: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.unit_s = 0.0
        self._set_attention(1.0)

    def begin(self, few: TimedPass, most: TimedPass) -> None:
        """Records steps timed at start-up: one of few rows, and one of the most rows that a step has.

        The host launches a step of few rows no faster than one of many. So a unit measured with small prompts
        alone would overestimate the cost of a row, which makes steps smaller, and the overestimate larger.
        """
        unit_s = most.seconds / most.rows
        self._unit_times.append(unit_s)
        self.unit_s = median(self._unit_times)
        self.least_rows = min(max(self.least_rows, int(few.seconds / unit_s)), most.rows)
        self._set_attention(self.attention)

    def of(self, start: int, count: int) -> float:
        """Units of tokens `start` to `start + count` of a sequence."""
        return count + attended(start, count) / self.half_context

    def of_step(self, chunks: Iterable[Chunk]) -> float:
        """Cost in units of a step that runs `chunks`."""
        return self._in_units.prefill_s(chunks)

    def tokens_within(self, start: int, units: float) -> int:
        """The most tokens from `start` on that cost at most `units`."""
        half = self.half_context
        if math.isinf(half) or math.isinf(units):
            return int(min(units, 2**31))
        slope = 1 + start / half
        return int(half * (math.sqrt(slope * slope + 2 * units / half) - slope))

    def units_within(self, seconds: float) -> float:
        """Number of units that take `seconds`; infinite before anything was measured."""
        return seconds / self.unit_s if self.unit_s > 0 else math.inf

    def seconds_of(self, units: float) -> float:
        """Predicted seconds of a step of `units`; 0 before anything was measured."""
        return units * self.unit_s

    def seconds_of_step(self, chunks: Sequence[Chunk], *, mixed: bool = False) -> float:
        """Predicted seconds of a step that runs `chunks`; `mixed`: beyond those of a decode step that is part
        of it."""
        alone_s = self.seconds_of(self.of_step(chunks))
        return min(self._few_mixed_s, alone_s) if mixed and _rows(chunks) <= self.least_rows else alone_s

    def added_to(self, costs: StepCosts) -> StepCosts:
        """Returns `costs` with those of prefill steps; a step of few rows costs what it adds to a decode
        step, once that was measured."""
        return replace(
            costs,
            prefill_token_s=self.unit_s,
            prefill_step_s=min(self._few_mixed_s, self.seconds_of(self.least_rows)),
            prefill_half_context=self.half_context,
        )

    def took(
        self, chunks: Sequence[Chunk], seconds: float, *, mixed: bool = False, decode_s: float = 0.0
    ) -> None:
        """Records the duration of a step, `mixed`: beyond `decode_s`, that of a decode step that was part of
        it; 0 where that is not known. It counts as a measurement of attention where the step has much of
        that, else of rows, unless it has so few that it took as long with fewer: then it bounds how many rows
        are that few, which start-up may have overestimated."""
        if mixed and _rows(chunks) <= self.least_rows:
            self._few_mixed.append(seconds)
            if decode_s:
                self._bound_least_rows(seconds + decode_s)
            return
        rows = max(_rows(chunks), self.least_rows)
        context = sum(attended(*chunk) for chunk in chunks) / self._half_context
        if self.unit_s and context > rows * ATTENTION_SHARE:
            slowness = (seconds / self.unit_s - rows) / context
            self._slowness.append(min(max(slowness, _FASTEST), _SLOWEST))
            self._set_attention(median(self._slowness))
        elif not self.unit_s or rows > self.least_rows:
            self._unit_times.append(seconds / (rows + context * self.attention))
            self.unit_s = median(self._unit_times)
        else:
            self._bound_least_rows(seconds)

    def _bound_least_rows(self, seconds: float) -> None:
        """Counts a whole step of few rows: alone and without attention they take no longer."""
        if self.unit_s:
            self._few_whole.append(seconds)
            least_rows = max(self.busy_rows, int(median(self._few_whole) / self.unit_s))
            self.least_rows = min(self.least_rows, least_rows)
            self._set_attention(self.attention)

    @property
    def _few_mixed_s(self) -> float:
        """Seconds that few rows add to a decode step; infinite before any were measured. The first measured
        ones may be much too long: a step that reads the weights by itself bounds them."""
        return median(self._few_mixed) if self._few_mixed else math.inf

    def _set_attention(self, attention: float) -> None:
        self.attention = attention
        self.half_context = self._half_context / attention
        # Costs that count units for seconds.
        self._in_units = StepCosts(1.0, self.least_rows, self.half_context)


def _rows(chunks: Iterable[Chunk]) -> int:
    return sum(count for _, count in chunks)
