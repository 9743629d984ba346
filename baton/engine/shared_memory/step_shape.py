"""How many rows, tokens and output words a decode step may have. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of up to `slots` sequences with `rows_per_slot` rows of activations each, the most tokens by
    which one step may advance one sequence. Rows that a sequence does not use are padding."""

    slots: int
    rows_per_slot: int = 1

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

    def slots_of(self, rows: int) -> int:
        """The most active slots of a step with so many rows."""
        return rows // self.rows_per_slot
