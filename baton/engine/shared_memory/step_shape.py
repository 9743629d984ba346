"""Largest numbers of rows, tokens and output words of a decode step. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DRAFTS = 7
"""Drafts of a sequence that one step can verify, whatever is configured."""
# Rows of the largest step that has drafts. Beyond, a row costs a step of an 8B model as much as a sequence.
_MOST_DRAFT_STEP_ROWS = 256


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of up to `slots` sequences. Each that is active has a row of activations; rows that are left
    verify drafts, so that a sequence has up to `rows_per_slot` rows: the most tokens by which one step may
    advance it. Rows of no sequence are padding. Raises ValueError for sizes that no step can have."""

    slots: int
    rows_per_slot: int = 1

    def __post_init__(self) -> None:
        if self.slots < 1 or not 1 <= self.rows_per_slot <= 1 + MOST_DRAFTS:
            raise ValueError(f"a step has slots, of 1 to {1 + MOST_DRAFTS} rows each, not {self}")

    @property
    def rows(self) -> int:
        """Rows of the largest step."""
        return max(self.slots, min(_MOST_DRAFT_STEP_ROWS, self.slots * self.rows_per_slot))

    @property
    def words(self) -> int:
        """Words of the output ring that one step may write: one for each row, and one for each mailbox entry,
        of which it applies up to as many as there are slots."""
        return self.rows + self.slots

    @property
    def least_words(self) -> int:
        """Room in the output ring without which no step runs. Where there is less than `words`, steps leave
        drafts out."""
        return 2 * self.slots
