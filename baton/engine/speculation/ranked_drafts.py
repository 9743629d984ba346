"""The drafts of a step's sequences in the order in which they get rows: the likeliest to hold first.
Torch-free.

A draft of depth d that has a row gives a token if it and those before it hold. So a row is worth the chance
of that, given that the draft is there; as worth as the draft before it at most, without which it gives
nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Slots = npt.NDArray[np.intp]

_LEAST = 1e-9


class RankedDrafts:
    """Drafts of n sequences. `accepted`, `drafted` [n, depths]: by sequence and depth the chance that a step
    with room for `depth` drafts accepts all of them, and that it has them."""

    def __init__(self, accepted: Floats, drafted: Floats) -> None:
        self._accepted, self._shape = accepted, accepted.shape
        self._worth = np.minimum.accumulate(accepted / np.maximum(drafted, _LEAST), axis=1)
        # By depth where they are worth the same: each sequence's first one before any second one.
        order = np.lexsort((-self._worth.T.ravel(),))
        self._depth, self._sequence = np.divmod(order, self._shape[0])
        self._rows = np.maximum(drafted[self._sequence, self._depth], _LEAST)
        self._before = np.cumsum(self._rows) - self._rows

    def tokens(self, spare: float) -> Floats:
        """Tokens that a step should give each sequence, [n], with `spare` rows for drafts of all of them."""
        shares = np.clip((spare - self._before) / self._rows, 0, 1)
        gains = shares * self._accepted[self._sequence, self._depth]
        tokens = np.ones(self._shape[0])
        np.add.at(tokens, self._sequence, gains)
        return tokens

    def budgets(self, spare: float) -> Slots:
        """Number of drafts of each sequence that should get rows, [n], of those that it may have."""
        served = self._sequence[self._before < spare]
        budgets: Slots = np.bincount(served, minlength=self._shape[0])
        return budgets
