"""Success of recent drafts, by slot and by depth, from the slots' lines of progress. Torch-free.

All sums decay over a second or less of steps that say something; where no step does, the last ones stay as
they are, so that sequences whose drafts were wrong do not become promising by waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from baton.engine.shared_memory.slot_progress import SlotProgress
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.speculation.ranked_drafts import Floats, Slots
from baton.engine.speculation.verified_drafts import VerifiedDrafts

_DECAY_S = 1.0
# The same of tokens a step: so short that after a change what is predicted is right within two seconds.
_TOKENS_DECAY_S = 0.5
# What is left of the sums beside a new observation, at least: none decides by itself.
_LEAST_KEPT = math.exp(-0.5)
# What a depth is taken to be like the one before it, as a number of steps.
_LIKE_BEFORE = 1.0
# What a sequence's sums begin with, as a number of steps that fared like all slots' recent ones, and of these
# before there were any the share of drafts that is right.
_PRIOR_STEPS, _PRIOR_SHARE = 2.0, 0.5
# Seconds after its last step for which a slot counts as one that decodes.
_RUNS_S = 0.25
# The part of the slots that have fewer tokens a step than `tokens_a_step`.
_QUARTER = 0.25

ALL_SLOTS: Slots = np.array([-1])
"""Stands for slots: the rates of the drafts of all of them."""


class DraftRates:
    """Success rates of drafts, which the loop updates after each step. `accepted` and `drafted` are chances
    by slot and depth."""

    def __init__(
        self, progress: SlotProgress, shape: StepShape, clock: Callable[[], float] = time.monotonic
    ) -> None:
        slots = shape.slots
        self.depths = depths = shape.rows_per_slot - 1
        """The most drafts of a step for one slot."""
        self._progress, self._clock = progress, clock
        self._depths = np.arange(depths)
        self._before = progress.counts()[:slots]
        self._at = np.full(slots, clock())
        self._moved_at = np.full(slots, -math.inf)
        self._all_at = clock()
        # Steps whose sequence came so deep and had room for a draft, and those whose draft was right; steps
        # with room, and those with a draft; of all slots in the last row.
        self._tries = np.zeros((slots + 1, depths))
        self._tries[:, 0] = _PRIOR_STEPS
        self._rights = _PRIOR_SHARE * self._tries
        self._room = np.full((slots + 1, depths), _PRIOR_STEPS)
        self._had = self._room.copy()
        self._steps = np.full(slots, _PRIOR_STEPS)
        self._tokens = self._steps.copy()
        self._rows = self._sequences = 1.0
        self.verified = VerifiedDrafts(depths)
        """Counts of the drafts that all steps have verified since the start."""
        self.ran = 1
        """Sequences that ran together when steps were observed last."""
        self.tokens_a_step = 1.0
        """Tokens that a step gives a sequence: the lower quartile of those that decode, or did last."""

    @property
    def rows_a_sequence(self) -> float:
        """Rows of a step for each sequence that it advances, on average, padding for drafts included."""
        return self._rows / self._sequences

    def running(self) -> Slots:
        """Slots that had a step recently."""
        return self._running_at(self._clock())

    def _running_at(self, now: float) -> Slots:
        return np.flatnonzero(self._moved_at >= now - _RUNS_S)

    def accepted(self, slots: Slots) -> Floats:
        """Chance, [slots, depths], that a step with room for `depth` drafts accepts all of them."""
        rights, tries = self._rights[slots], self._tries[slots]
        shares: Floats = np.empty_like(tries)
        before: Floats = rights[:, 0] / tries[:, 0]
        all_so_far: Floats = np.ones(len(before))
        for depth in self._depths:
            before = (rights[:, depth] + _LIKE_BEFORE * before) / (tries[:, depth] + _LIKE_BEFORE)
            all_so_far = all_so_far * before
            shares[:, depth] = all_so_far
        return shares

    def drafted(self, slots: Slots) -> Floats:
        """Chance, [slots, depths], that a step with room for `depth` drafts has that many."""
        shares: Floats = self._had[slots] / self._room[slots]
        return shares

    def observe(self, batch: int, *, drafts: bool, budgets: Slots | None = None) -> int:
        """Reads the counters after one step, or after several of one kind that were seen to end together,
        `batch` their number of rows and `budgets` the most drafts that each slot might have; None: any.
        Returns how many sequences they advanced."""
        counts = self._progress.counts()[: len(self._before)]
        fresh = counts[:, 0] != self._before[:, 0]
        delta = np.where(fresh[:, None], counts, counts - self._before)[:, 1:]
        self._before = counts
        moved = np.flatnonzero(delta[:, 0] > 0)
        if not len(moved):
            return 0
        self.verified.add(delta[moved])
        self._begin(np.flatnonzero(fresh))
        now = self._clock()
        steps, given, accepted = delta[moved, :3].T.astype(np.float64)[:, :, None]
        self._add_tokens(moved, steps[:, 0], accepted[:, 0], now)
        rows = batch if drafts else len(moved)
        if drafts:
            most = np.full(len(moved), self.depths) if budgets is None else budgets[moved]
            room = self._sure_room(most, rows - len(moved))
            self._add_drafts(moved, steps, given, np.minimum(accepted, given), room, now)
        self._rows, self._sequences = 0.98 * self._rows + rows, 0.98 * self._sequences + len(moved)
        self._moved_at[moved] = now
        running = self._running_at(now)  # not later: a thread may have to wait long for its turn
        self.ran = len(running)
        self.tokens_a_step = _lower_quartile(self._tokens[running] / self._steps[running])
        return len(moved)

    def _sure_room(self, most: Slots, spare: int) -> Floats:
        """Number of drafts that each slot surely had room for, [moved, 1], of `most` and with `spare` rows
        for all: first drafts come before second ones."""
        by_depth = (most[:, None] > self._depths).sum(axis=0).cumsum()
        shared = np.searchsorted(by_depth, spare, side="right")
        room: Floats = np.minimum(most, shared)[:, None].astype(np.float64)
        return room

    def _begin(self, fresh: Slots) -> None:
        """Has slots with new sequences expect what all slots' drafts are like."""
        self._tries[fresh] = self._rights[fresh] = 0.0
        self._tries[fresh, 0] = self._room[fresh] = _PRIOR_STEPS
        self._rights[fresh, 0] = _PRIOR_STEPS * self._rights[-1, 0] / self._tries[-1, 0]
        self._had[fresh] = _PRIOR_STEPS * self._had[-1] / self._room[-1]
        tokens = self._tokens.sum() / self._steps.sum()
        self._steps[fresh], self._tokens[fresh] = _PRIOR_STEPS, _PRIOR_STEPS * tokens

    def _add_tokens(self, moved: Slots, steps: Floats, accepted: Floats, now: float) -> None:
        kept = np.exp(-np.minimum((now - self._moved_at[moved]) / _TOKENS_DECAY_S, 1.0))
        self._steps[moved] = kept * self._steps[moved] + steps
        self._tokens[moved] = kept * self._tokens[moved] + steps + accepted

    def _add_drafts(
        self,
        moved: Slots,
        steps: Floats,
        given: Floats,
        accepted: Floats,
        room: Floats,
        now: float,
    ) -> None:
        """`steps`, `given`, `accepted`, `room`: [moved, 1]; of several steps the drafts are taken to be as
        many in each. `room`: drafts that each slot surely had room for."""

        def as_deep(count: Floats) -> Floats:
            return np.minimum(np.maximum(count - steps * self._depths, 0), steps)

        had, rights = as_deep(given), as_deep(accepted)
        has_room = steps * (self._depths < room)
        came = np.concatenate((steps, rights[:, :-1]), axis=1)
        tries = np.minimum(came, np.maximum(had, has_room))
        drafted = np.minimum(had, has_room)
        kept = np.maximum(np.exp((self._at[moved] - now) / _DECAY_S), _LEAST_KEPT)[:, None]
        kept_of_all = max(math.exp((self._all_at - now) / _DECAY_S), _LEAST_KEPT)
        # Each share's two sums, the whole first: they decay together, and only with what says something.
        for whole, part, more, more_part in (
            (self._tries, self._rights, tries, rights),
            (self._room, self._had, has_room, drafted),
        ):
            for sums, added in ((part, more_part), (whole, more)):
                sums[moved] = np.where(more > 0, kept * sums[moved] + added, sums[moved])
                of_all = more.sum(axis=0) > 0
                sums[-1] = np.where(of_all, kept_of_all * sums[-1] + added.sum(axis=0), sums[-1])
        self._at[moved] = self._all_at = now


def _lower_quartile(values: Floats) -> float:
    """The same as numpy's quantile, which takes a fifth of what observing a step does."""
    ordered, place = np.sort(values), _QUARTER * (len(values) - 1)
    low, between = ordered[int(place)], place % 1
    return float(low + between * (ordered[math.ceil(place)] - low))
