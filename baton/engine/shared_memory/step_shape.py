"""How many rows, tokens and output words a decode step may have. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens by which one slot advances in one step, at most. With speculative decoding it will be more than one.
MAX_TOKENS_A_STEP = 1


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of up to `slots` sequences with `rows_per_slot` rows of activations each; a row is one token."""

    slots: int
    rows_per_slot: int = MAX_TOKENS_A_STEP

    @property
    def rows(self) -> int:
        """Rows of a step whose slots are all active."""
        return self.slots * self.rows_per_slot

    @property
    def words(self) -> int:
        """Words of the output ring that one step may write: one for each row, and one for each mailbox entry,
        of which it applies up to as many as there are slots."""
        return self.rows + self.slots

    def rows_of(self, active: int) -> int:
        """Rows of a step with so many active slots."""
        return active * self.rows_per_slot
