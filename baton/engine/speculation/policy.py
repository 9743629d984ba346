"""Chooses how many rows the next decode step has for drafts, and how many drafts each slot may have, by what
they cost and what they bring. Torch-free.

It takes the number of rows, none included, with which most sequences keep their own TPOT limits, and among
equals the one that makes most tokens a second:

    tokens of a sequence = 1 + sum over its drafts of (share that gets a row x chance that all so far hold)
    its time per token   = seconds of the step / tokens

A size's rows go to the drafts that are likeliest to hold (`RankedDrafts`), so that a slot whose drafts fail
has fewer and one whose drafts hold has more. Where a limit is stated, a step with drafts takes no longer than
1.25 times the tightest one, so that requests whose text does not repeat do not pay for those whose text does.

Drafts that fail are tried again: where none are worth their rows, one step of 64 still has drafts; where some
are, each slot may have one in at least one choice of 8.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.engine.speculation.draft_rates import ALL_SLOTS, DraftRates
from baton.engine.speculation.ranked_drafts import Floats, RankedDrafts, Slots
from baton.engine.speculation.size_times import SizeTimes, StepSize

MOST_SIZES = 8
"""Numbers of rows that steps with drafts may have: each is two graphs."""
# What a step with drafts may take of the tightest limit.
_OF_LIMIT = 1.25
# Steps without drafts before one that probes.
_PLAIN = 63
# A slot whose drafts get no row may have one in one choice of this many.
_TRIED = 8
# No step is expected to take less.
_LEAST_S = 1e-9
# Seconds for which a choice stands.
_STANDS_S = 0.1
# The same of what is expected of other numbers of sequences, which routers learn a few times a second.
_EXPECTED_S = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Rows of a step, 0 where it has no drafts, and the most drafts of each slot [slots]."""

    rows: int
    budgets: Slots


class DraftPolicy:
    """Chooses among `sizes`, ascending. `choose` is asked before each step; `launched` records one."""

    def __init__(
        self,
        rates: DraftRates,
        times: SizeTimes,
        slots: int,
        sizes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for more than `MOST_SIZES` sizes."""
        if len(sizes) > MOST_SIZES:
            raise ValueError(f"steps with drafts have up to {MOST_SIZES} sizes, not {len(sizes)}")
        self._rates, self._times, self._sizes, self._clock = rates, times, tuple(sizes), clock
        self._limits: Floats = np.full(slots, math.inf)
        self.limit_s = math.inf
        """The limit of sequences whose requests state none, or a looser one."""
        self._unbounded: Slots = np.full(slots, rates.depths)
        self.budgets = self._unbounded
        """[slots] int64: the most drafts that each slot may have in the step chosen last; another array
        whenever that changes."""
        self._turn = self._choices = 0
        self._chosen: dict[tuple[int, int], _Choice] = {}
        self._chosen_at = self._expected_at = -math.inf
        self._expected: dict[int, tuple[int, float]] = {}

    def limit(self, slot: int, tpot_s: float | None) -> None:
        """Says what time per output token the request in a slot asks for; None: none."""
        self._limits[slot] = tpot_s or math.inf

    def choose(self, sequences: int, plain_rows: int) -> int:
        """Returns the rows of the next step of `sequences` sequences; 0: none are for drafts, and it has
        `plain_rows`."""
        now, key = self._clock(), (sequences, plain_rows)
        if now - self._chosen_at >= _STANDS_S:
            self._chosen.clear()
            self._chosen_at = now
            self._choices += 1
        if key not in self._chosen:
            self._chosen[key] = self._best(sequences, plain_rows)
        chosen = self._chosen[key]
        self.budgets = chosen.budgets
        return chosen.rows or self._probe(sequences)

    def launched(self, *, drafts: bool) -> None:
        """Records that a step was launched."""
        self._turn = 0 if drafts else self._turn + 1

    def expected(self, sequences: int, plain_rows: int) -> tuple[int, float]:
        """Rows that a step of `sequences` sequences should have, and the tokens that it should give each, if
        all are like the mean of those that had steps recently and none has a limit."""
        if self._clock() - self._expected_at >= _EXPECTED_S:
            self._expected.clear()
            self._expected_at = self._clock()
        if sequences not in self._expected:
            self._expected[sequences] = self._best_of_mean(sequences, plain_rows)
        return self._expected[sequences]

    def _best_of_mean(self, sequences: int, plain_rows: int) -> tuple[int, float]:
        if self._times.is_empty:
            return plain_rows, 1.0
        mean = RankedDrafts(self._rates.accepted(ALL_SLOTS), self._rates.drafted(ALL_SLOTS))

        def tokens(rows: int) -> float:
            return float(mean.tokens(rows / sequences - 1)[0])

        rows = max(
            [0, *self._useful(sequences)],
            key=lambda rows: tokens(rows) / self._seconds(rows, sequences, plain_rows),
        )
        return rows or plain_rows, tokens(rows)

    def _seconds(self, rows: int, sequences: int, plain_rows: int) -> float:
        """Seconds of a step of `rows` rows, some of them for drafts; 0: of one of `plain_rows` without."""
        size = StepSize(rows or plain_rows, sequences, drafts=bool(rows))
        return max(self._times.expected_s(size), _LEAST_S)

    def _probe(self, sequences: int) -> int:
        """The smallest size in which each sequence may have a draft, where it is time for that."""
        if self._turn < _PLAIN:
            return 0
        possible = self._possible(sequences)
        return next((size for size in possible if size >= 2 * sequences), max(possible, default=0))

    def _possible(self, sequences: int) -> list[int]:
        """Sizes with rows for drafts in which a step does not take too long."""
        most_s = _OF_LIMIT * min(self.limit_s, float(self._limits.min()))
        sizes = [StepSize(rows, sequences, drafts=True) for rows in self._useful(sequences)]
        return [size.rows for size in sizes if self._times.at_most_s(size) <= most_s]

    def _useful(self, sequences: int) -> list[int]:
        """Sizes with rows for drafts, up to the one that has rows for all that there may be."""
        most = bisect_left(self._sizes, sequences * (1 + self._rates.depths))
        return [size for size in self._sizes[: most + 1] if size > sequences]

    def _best(self, sequences: int, plain_rows: int) -> _Choice:
        slots = self._rates.running()[:sequences]
        # Of sequences whose slots are not known what all slots' drafts are like is expected.
        unknown = sequences - len(slots)
        at = np.concatenate((slots, np.repeat(ALL_SLOTS, unknown)))
        drafts = RankedDrafts(self._rates.accepted(at), self._rates.drafted(at))
        limits = np.concatenate((self._limits[slots], np.full(unknown, math.inf))).clip(max=self.limit_s)

        def worth(rows: int) -> tuple[int, float]:
            seconds = self._seconds(rows, sequences, plain_rows)
            tokens = drafts.tokens(max(rows - sequences, 0))
            return int((seconds <= limits * tokens).sum()), float(tokens.sum()) / seconds

        possible = [] if self._times.is_empty else self._possible(sequences)
        rows = max([0, *possible], key=worth)
        return _Choice(rows, self._budgets(slots, drafts, rows - sequences) if rows else self._unbounded)

    def _budgets(self, slots: Slots, drafts: RankedDrafts, spare: int) -> Slots:
        """The most drafts of each slot in steps with `spare` rows for drafts; of those that had no step of
        late, as many as there may be."""
        budgets = self._unbounded.copy()
        budgets[slots] = drafts.budgets(spare)[: len(slots)]
        tried = budgets[self._choices % _TRIED :: _TRIED]
        tried.clip(min=1, out=tried)
        return budgets
