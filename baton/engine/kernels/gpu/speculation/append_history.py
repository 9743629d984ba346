"""Appends what a step gives out to the slots' histories: the same as `History.append`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.step.step_kernels import ROWS
from baton.engine.speculation.history import History


@triton.jit
def _append_history(
    control,
    tokens,
    end,
    fixed,
    row_slot,
    row_position,
    row_place,
    row_drawn,
    LENGTH: tl.constexpr,
    POWER: tl.constexpr,
):
    row = tl.arange(0, POWER)
    place = tl.load(row_place + row, mask=row < tl.load(control + ROWS), other=-1)
    counts = place >= 0
    slot = tl.load(row_slot + row, mask=counts, other=0)
    # The token drawn stands behind the one that was read.
    position = tl.load(row_position + row, mask=counts, other=0) + 1
    token = tl.load(row_drawn + row, mask=counts, other=0)
    begin = tl.load(fixed + slot, mask=counts, other=0)
    at = slot.to(tl.int64) * LENGTH + begin + position % (LENGTH - begin)
    tl.store(tokens + at, token, mask=counts)
    tl.atomic_max(end + slot, position + 1, mask=counts, sem="relaxed")


def append_history(
    history: History, rows: tuple[Tensor, Tensor, Tensor], row_drawn: Tensor, control: Tensor
) -> None:
    """Appends the tokens `row_drawn` [R] int32 of rows that count. `rows`: slot, position (of the token read)
    and place of each, [R] int32, the place negative where the row's token does not count."""
    _append_history[(1,)](
        control, history.tokens, history.end, history.fixed, *rows, row_drawn,
        LENGTH=history.length, POWER=triton.next_power_of_2(row_drawn.shape[0]), num_warps=4,
    )  # fmt: skip
