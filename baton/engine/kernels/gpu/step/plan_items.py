"""The plan of a step's attention: its rows' items, by one program for each cache group."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.engine.kernels.gpu.attention.items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIRST,
    ITEM_PARTS,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_SLOT,
    ITEM_WIDTH,
    item_span,
)
from baton.engine.kernels.gpu.step.step_kernels import ROWS


@triton.jit
def plan_items(
    control,
    row_slot,
    row_position,
    count,
    items,
    window,
    wanted,
    shortest,
    wave,
    ROWS_POWER: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Cuts the rows by their `SplitPolicy`; FIXED 0: mode `fast`. The list holds all items: `fast` cuts no
    more than its policy's bound, and of parts of one length `begin` has run no row that does not fit.
    """
    row = tl.arange(0, ROWS_POWER)
    rows = tl.load(control + ROWS).to(tl.int32)
    there = row < rows
    position = tl.load(row_position + row, mask=there, other=0)
    slot = tl.load(row_slot + row, mask=there, other=0)
    start, span = item_span(position, window, TILE)
    span = tl.where(there, span, 0)
    if FIXED > 0:
        part = tl.zeros_like(span) + FIXED
    else:
        about = tl.maximum(shortest, tl.cdiv(tl.sum(span, 0), wanted))
        pieces = tl.maximum(tl.cdiv(span, about), 1)
        rest = rows % wave
        if (rows > wave) & (rest > 0):
            filling = tl.minimum(wave // rest, tl.cdiv(span, shortest))
            pieces = tl.where(row >= rows - rest, tl.maximum(pieces, filling), pieces)
        part = tl.maximum(tl.cdiv(tl.cdiv(span, pieces), TILE) * TILE, TILE)
    parts = tl.cdiv(span, part)
    first = tl.cumsum(parts, 0) - parts
    tl.store(count, tl.sum(parts, 0))
    for p in range(0, tl.max(parts, 0)):
        mask = p < parts
        line = items + (first + p) * ITEM_WIDTH
        begin_at = start + p * part
        tl.store(line + ITEM_ROW, row, mask=mask)
        tl.store(line + ITEM_SLOT, slot, mask=mask)
        tl.store(line + ITEM_POSITION, position, mask=mask)
        tl.store(line + ITEM_BEGIN, begin_at, mask=mask)
        tl.store(line + ITEM_END, tl.minimum(begin_at + part, position + 1), mask=mask)
        tl.store(line + ITEM_FIRST, first, mask=mask)
        tl.store(line + ITEM_PARTS, parts, mask=mask)
