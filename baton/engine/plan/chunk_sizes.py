"""Shares the rows of a prefill step out to prompts, one after the other. Torch-free."""

from __future__ import annotations

import math

from baton.engine.sequence import Sequence
from baton.perf_model.prefill_fit import ATTENTION_SHARE, PrefillFit

# Least length of a step, in units of its cost, however slow the worker: a shorter one is mostly overhead.
LEAST_UNITS = 128.0
# Largest share of a step given to a prompt that is more than a step from its end, while others that may not
# wait for all of it end in that step, or short ones have come lately, since more may come while it runs.
BESIDE_SHARE = 1 / 2
# How much longer a step may be for a prompt to end in it, since what it would leave behind is a step of its
# own, or for a chunk to end at a multiple of the alignment.
SLACK = 1 / 8


class StepFilling:
    """A step of up to `seconds` and `tokens` rows that is being filled. `alignment`: chunks that are longer,
    and not their sequence's last, end at a multiple of it. `crowded`: short prompts wait or have come lately.
    `given`: the rows of each sequence."""

    def __init__(
        self, cost: PrefillFit, seconds: float, tokens: int, alignment: int, *, crowded: bool
    ) -> None:
        self._cost = cost
        self._tokens = tokens
        self._alignment = alignment
        self._crowded = crowded
        self._whole = max(cost.units_within(seconds), LEAST_UNITS)
        self._used = 0.0
        self.given: dict[Sequence, int] = {}
        self._ends = False

    @property
    def rows(self) -> int:
        return sum(self.given.values())

    @property
    def attends_much(self) -> bool:
        """True where attention takes much of its time, beside which products hardly count."""
        return self._used > (1 + ATTENTION_SHARE) * self.rows

    def cut(self, rows: int) -> None:
        """Takes tokens from the sequences that were given some last, until the step has at most `rows`
        rows."""
        for sequence in reversed(list(self.given)):
            more = min(max(0, self.rows - rows), self.given[sequence])
            self.given[sequence] -= more
            if not self.given[sequence]:
                del self.given[sequence]

    def give(self, sequence: Sequence, share: float = 1.0, *, patient: bool = False) -> None:
        """Gives a sequence what is left of the step, or a share of it, beside what it has already. `patient`:
        it may wait for all of the step, should it end in it."""
        has = self.given.get(sequence, 0)
        start = sequence.reached + has
        left = sequence.length - start
        units = max(0.0, self._whole - self._used) * share
        longest, needed = self._whole * (1 + SLACK), self._cost.of(start, left)
        if (self._ends or self._crowded) and needed > longest:
            units = min(units, max(LEAST_UNITS, self._whole * BESIDE_SHARE) - self._used)
        elif needed <= (longest - self._used) * share:
            units = max(units, needed)
        most = min(left, math.ceil(self._tokens * share))
        count = min(most, self._cost.tokens_within(start, max(0.0, units)))
        if not self.given:
            count = max(count, 1)  # whatever it costs, a step gets on
        elif count < left and units < LEAST_UNITS:
            count = 0  # mostly overhead
        if self._alignment < count < left:
            count = self._aligned(start, count, most, units)
        if count > 0:
            self.given[sequence] = has + count
            self._tokens -= count
            self._used += self._cost.of(start, count)
            self._ends = self._ends or (count == left and not patient)

    def _aligned(self, start: int, count: int, most: int, units: float) -> int:
        """The chunk's tokens up to the next multiple of the alignment, where they cost little more than
        `units`, else up to the last one."""
        down = count - (start + count) % self._alignment
        up = down + self._alignment
        fits = self._used + self._cost.of(start, up) <= self._whole * (1 + SLACK)
        if down < count and up <= most and fits and self._cost.of(start, up) <= units * (1 + SLACK):
            return up
        return down
