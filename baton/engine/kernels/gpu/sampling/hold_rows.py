"""Decides which rows draw in a step: one whose request uses masks waits for the mask of that very token.

The only kernel that reads the masks' tags, so that all that follow see one decision, whatever the host writes
meanwhile; and a kernel of its own, so that they see every bit of a mask whose tag it has seen.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import clock_ns
from baton.engine.kernels.gpu.sampling.sampler_rows import FEATURES, GENERATION, MASKED
from baton.engine.kernels.gpu.step.step_kernels import (
    CLOCK_LINES,
    CLOCK_WIDTH,
    HELD,
    RECORD_WORDS,
    REPLAYS,
    ROWS,
)


@triton.jit
def _hold(control, clocks, records, tags, row_slot, row_position, row_place, POWER: tl.constexpr):
    # The head's product has ended.
    tl.store(clocks + (tl.load(control + REPLAYS) % CLOCK_LINES) * CLOCK_WIDTH + 1, clock_ns())
    row = tl.arange(0, POWER)
    there = row < tl.load(control + ROWS)
    slot = tl.load(row_slot + row, mask=there, other=0)
    features = tl.load(records + slot * RECORD_WORDS + FEATURES, mask=there, other=0)
    generation = tl.load(records + slot * RECORD_WORDS + GENERATION, mask=there, other=0)
    # The token drawn stands behind the one that was read.
    position = tl.load(row_position + row, mask=there, other=0) + 1
    wanted = (generation.to(tl.int64) << 32) | position
    masked = there & ((features & MASKED) != 0)
    tag = tl.load(tags + slot, mask=masked, other=0, volatile=True)
    draws = there & ((tag == wanted) | (masked == 0))
    place = tl.cumsum(draws.to(tl.int32), 0) - 1
    tl.store(row_place + row, tl.where(draws, place, -1), mask=there)
    waiting = tl.sum((there & (draws == 0)).to(tl.int64), 0)
    tl.store(control + HELD, tl.load(control + HELD) + waiting)


def hold_rows(
    row_place: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    records: Tensor,
    tags: Tensor,
    control: Tensor,
    clocks: Tensor,
) -> None:
    """Numbers the rows that draw: row_slot, row_position [R] int32 (of the token read), records [slots, 32]
    int32, tags [slots] int64 (`SlotMasks`) → row_place [R] int32: the row's place among those that draw,
    negative where it waits."""
    _hold[(1,)](
        control, clocks, records, tags, row_slot, row_position, row_place,
        POWER=triton.next_power_of_2(row_place.shape[0]), num_warps=4,
    )  # fmt: skip
