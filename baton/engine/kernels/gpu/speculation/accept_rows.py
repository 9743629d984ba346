"""Decides which rows' tokens count: runs between the draw and `finish`.

A slot's first row counts, if it draws. A draft's row counts if the row before it counts, has drawn the draft
itself, and has not ended the sequence with it. So the tokens that count are those that one row a step would
draw one after another, whatever the drafts are; the plain rule is `baton.engine.speculation.acceptance`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.speculation.add_drafts import RowArrays
from baton.engine.kernels.gpu.step.step_kernels import RECORD_WORDS, ROWS
from baton.engine.shared_memory.mailbox import MAX_STOP_IDS, field_offset

_END = tl.constexpr(field_offset("end") // 4)
_STOP_IDS = tl.constexpr(field_offset("stop_ids") // 4)
_STOPS = tl.constexpr(MAX_STOP_IDS)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _accept_rows(
    control,
    records,
    row_slot,
    row_token,
    row_position,
    row_depth,
    row_place,
    row_drawn,
    POWER: tl.constexpr,
):
    row = tl.arange(0, POWER)
    there = row < tl.load(control + ROWS)
    slot = tl.load(row_slot + row, mask=there, other=0)
    depth = tl.load(row_depth + row, mask=there, other=0)
    is_draft = there & (depth > 0)
    draft = tl.load(row_token + row, mask=is_draft, other=0)
    drawn = tl.load(row_drawn + row - 1, mask=is_draft, other=-1)
    mine = records + slot * RECORD_WORDS
    stop = tl.arange(0, _STOPS)
    stops = tl.load(mine[:, None] + _STOP_IDS + stop[None, :], mask=is_draft[:, None], other=-1)
    ends = tl.max((stops == draft[:, None]).to(tl.int32), 1) != 0
    # The sequence is as long as its last token's position + 1 says.
    length = tl.load(row_position + row, mask=is_draft, other=0) + 1
    ends = ends | (length >= tl.load(mine + _END, mask=is_draft, other=0))
    draws = tl.load(row_place + row, mask=there, other=-1) >= 0
    wrong = tl.where(is_draft, (draft != drawn) | ends, there & (draws == 0)).to(tl.int32)
    # A row counts if none is wrong from its slot's first row on.
    wrongs = tl.cumsum(wrong, 0)
    before = tl.associative_scan(tl.where(depth == 0, wrongs - wrong, 0), 0, _larger)
    counts = there & (wrongs == before)
    place = tl.cumsum(counts.to(tl.int32), 0) - 1
    tl.store(row_place + row, tl.where(counts, place, -1), mask=there)


def accept_rows(rows: RowArrays, row_drawn: Tensor, records: Tensor, control: Tensor) -> None:
    """Numbers the rows that count: row_drawn [R] int32, and `place`, negative for rows that are held →
    `place`: the row's place among those that count, negative for all others. records [slots, 32] int32."""
    _accept_rows[(1,)](
        control, records, rows.slot, rows.token, rows.position, rows.depth, rows.place, row_drawn,
        POWER=triton.next_power_of_2(row_drawn.shape[0]), num_warps=4,
    )  # fmt: skip
