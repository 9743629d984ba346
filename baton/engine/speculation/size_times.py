"""Seconds of decode steps by their rows and sequences. Torch-free.

A step's seconds are those of its kind for a number of sequences, plus what all kinds have in common:
contexts, and the sampler. Kinds are measured at the start where a device allows that; both parts are
corrected by steps that run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import NamedTuple

Kind = tuple[int, bool]
"""Rows of a step, and whether those beyond one a slot verify drafts."""

# Weight of the latest step in what all kinds have in common, and in what is the kind's own: contexts change
# more than what a device takes for a number of rows, and kinds that do not run must not fall behind.
_COMMON, _OWN = 0.05, 0.01
# A step that takes `_OUTLIER` times as long as expected is left out, since something else ran before it, but
# for each `_OUTLIERS`-th in a row.
_OUTLIER, _OUTLIERS = 2.0, 8
# Steps of a kind that are first seen with a number of sequences, of which the shortest counts: much may make
# a single step longer, and a kind that seems to take too long hardly runs again.
_FIRST = 8
# Numbers of sequences of which steps are timed apart differ by this factor at least.
_APART = 1.5


class StepSize(NamedTuple):
    """Rows of a step, of how many sequences, and whether further rows verify drafts."""

    rows: int
    sequences: int
    drafts: bool


class _BySequences:
    """Seconds of one kind, linear between the numbers of sequences that are known and constant beyond."""

    def __init__(self) -> None:
        self._at: list[int] = []
        self._seconds: dict[int, float] = {}
        # First steps that are still to come, by number of sequences.
        self._first: dict[int, int] = {}

    def set(self, sequences: int, seconds: float, first: int = 0) -> None:
        """Makes a number known, by a measurement at the start or the first of `first` steps."""
        if sequences not in self._seconds:
            insort(self._at, sequences)
        self._seconds[sequences], self._first[sequences] = seconds, first - 1

    def shorten(self, sequences: int, seconds: float) -> bool:
        """Takes one of the first steps of a number; True where it is the shortest of them, and counts."""
        left = self._first.get(sequences, 0)
        if left <= 0:
            return False
        self._first[sequences] = left - 1
        if seconds >= self._seconds[sequences]:
            return False
        self._seconds[sequences] = seconds
        return True

    def value(self, sequences: int) -> float:
        return sum(share * self._seconds[known] for known, share in self._near(sequences))

    def reaches(self, sequences: int) -> bool:
        """True if steps of about `sequences` sequences, or of more, are known."""
        return sequences < self._at[-1] * _APART

    def correct(self, sequences: int, error: float) -> None:
        """Moves the value at `sequences` by a part of `error`; one that is far from all that are known
        becomes known itself."""
        if not (self._at[0] / _APART < sequences and self.reaches(sequences)):
            self.set(sequences, self.value(sequences) + error, _FIRST)
            return
        near = self._near(sequences)
        if all(max(sequences / known, known / sequences) > _APART for known, _ in near):
            self.set(sequences, self.value(sequences), _FIRST)
            near = [(sequences, 1.0)]
        for known, share in near:
            self._seconds[known] += _OWN * share * error

    def _near(self, sequences: int) -> list[tuple[int, float]]:
        """The known numbers that the value at `sequences` is made of, and the share of each."""
        place = bisect_left(self._at, sequences)
        if place == len(self._at):
            return [(self._at[-1], 1.0)]
        above = self._at[place]
        if above == sequences or place == 0:
            return [(above, 1.0)]
        below = self._at[place - 1]
        share = (sequences - below) / (above - below)
        return [(below, 1 - share), (above, share)]


class SizeTimes:
    """Seconds of a step of each size."""

    def __init__(self) -> None:
        self._own: dict[Kind, _BySequences] = {}
        self._common_s = 0.0
        self._outliers = 0

    def measured(self, seconds: Mapping[StepSize, float]) -> None:
        """Records steps that were measured at the start; other sizes are measured when they run."""
        for size, each in seconds.items():
            self._own.setdefault((size.rows, size.drafts), _BySequences()).set(size.sequences, each)

    @property
    def is_empty(self) -> bool:
        """True before anything was measured."""
        return not self._own

    def expected_s(self, size: StepSize) -> float:
        """Seconds of a step: no more than of steps with more rows, which may be known better; of a kind that
        never ran as of the one nearest to it, so that it is tried."""
        rows, sequences, drafts = size
        if not self._own:
            return 0.0
        own_s = self._own[self._nearest((rows, drafts))].value(sequences)
        for kind, larger in self._own.items():
            if kind[0] >= rows and kind[1] >= drafts and larger.reaches(sequences):
                own_s = min(own_s, larger.value(sequences))
        return max(0.0, self._common_s + own_s)

    def at_most_s(self, size: StepSize) -> float:
        """The same, but of a kind that never ran in proportion to its rows."""
        expected, kind = self.expected_s(size), (size.rows, size.drafts)
        if kind in self._own or not self._own:
            return expected
        return expected * max(1.0, size.rows / self._nearest(kind)[0])

    def observe(self, size: StepSize, seconds: float) -> None:
        """Records a step that has ended."""
        rows, sequences, drafts = size
        own = self._own.get((rows, drafts))
        if own is None:
            own = self._own[rows, drafts] = _BySequences()
            own.set(sequences, seconds - self._common_s, _FIRST)
            return
        if own.shorten(sequences, seconds - self._common_s):
            return
        expected = self._common_s + own.value(sequences)
        if seconds > _OUTLIER * expected and self._outliers < _OUTLIERS:
            self._outliers += 1
            return
        self._outliers = 0
        error = seconds - expected
        self._common_s += _COMMON * error
        own.correct(sequences, error)

    def _nearest(self, kind: Kind) -> Kind:
        """The kind itself where it is known, else the one that is most like it."""
        rows, drafts = kind
        return min(self._own, key=lambda known: (abs(known[0] - rows), known[1] != drafts))
