"""The rows of a decode step in one run of memory, so that one copy sends a step to other devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.gpu.step import step_kernels as kernels

# Arrays begin at multiples of 16 bytes, by which kernels are compiled.
_WORDS_ALIGNED = 4
_HEAD = 2 * kernels.CONTROL_WORDS
_ROWS_AT = 2 * kernels.ROWS.value


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows. `control` [CONTROL_WORDS] int64: the state of `step_kernels`; `slot`, `token`,
    `position` [R] int32; `sent` int32: all that a device needs to run the step, of which the first word is
    the number of rows. All are views of one memory:

        control … | ROWS  RAN  TURN … | slot | token | position
                  └────────────── sent ──────────────────────┘
    """

    control: Tensor
    slot: Tensor
    token: Tensor
    position: Tensor
    sent: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> StepRows:
        """Zeros for up to `rows` rows."""
        each = _aligned(rows)
        words = torch.zeros(_HEAD + 3 * each, dtype=torch.int32, device=device)
        slot, token, position = (words[_HEAD + n * each :][:rows] for n in range(3))
        return cls(words[:_HEAD].view(torch.int64), slot, token, position, words[_ROWS_AT:])

    @staticmethod
    def words(rows: int) -> int:
        """Number of words of `sent`, of up to `rows` rows."""
        count: int = _HEAD - _ROWS_AT + 3 * _aligned(rows)
        return count

    @property
    def count(self) -> Tensor:
        """[1] int64: how many rows the step has."""
        return self.control[kernels.ROWS.value :][:1]


def _aligned(words: int) -> int:
    return -(-words // _WORDS_ALIGNED) * _WORDS_ALIGNED
