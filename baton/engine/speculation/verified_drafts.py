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
# Columns of `Progress` from which the counts of sources but the first follow: of all drafts, and of each
# other source.
_DRAFTS = [_FIELDS.index(name) for name in ("drafts", "drafts_predicted", "drafts_shared")]
_ACCEPTED = [_FIELDS.index(name) for name in ("accepted", "accepted_predicted", "accepted_shared")]
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
        for counts, columns in ((self.rows, _DRAFTS), (self.accepted, _ACCEPTED)):
            total, *others = (advanced[:, column] for column in columns)
            text = total - sum(others)
            for source, drafts in enumerate((text, *others)):
                deep = drafts[:, None] - steps[:, None] * self._depths
                counts[source] += np.clip(deep, 0, steps[:, None]).sum(axis=0)
