"""Counts of the drafts that steps have verified, by where they came from and by depth, since the start.
Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.engine.shared_memory.slot_progress import Progress
from baton.engine.speculation.ranked_drafts import Floats

SOURCES = ("text", "prediction", "table")
"""Names of the sources of drafts, in the order of `Source`."""
_FIELDS = Progress.__slots__
# Columns of `Progress`, for drafts that had a row and for those that were accepted: of all sources, from
# which the first one's follows, and of each other source.
_COUNTS = [
    [_FIELDS.index(name) for name in (what, f"{what}_predicted", f"{what}_shared")]
    for what in ("drafts", "accepted")
]
_STEPS = _FIELDS.index("steps")


class VerifiedDrafts:
    """Counts of verified drafts. `rows`, `accepted` [sources, depths]: drafts of each source and depth that
    had a row, and those that were accepted. `steps`: sequences that steps advanced."""

    def __init__(self, depths: int) -> None:
        self.rows: Floats = np.zeros((len(SOURCES), depths))
        self.accepted = self.rows.copy()
        self.steps = 0
        self._depths = np.arange(depths)

    def add(self, advanced: npt.NDArray[np.int64]) -> None:
        """Adds what steps did. `advanced` [slots, fields]: by how much the lines of slots that moved were
        advanced, in the order of `Progress`. Several steps of one slot are taken to have as many drafts
        each."""
        steps = advanced[:, _STEPS]
        self.steps += int(steps.sum())
        counts = advanced[:, _COUNTS]  # [slots, rows or accepted, sources]
        counts[:, :, 0] -= counts[:, :, 1:].sum(axis=2)
        most = steps[:, None, None, None]
        deep = np.minimum(np.maximum(counts[..., None] - most * self._depths, 0), most).sum(axis=0)
        self.rows += deep[0]
        self.accepted += deep[1]
