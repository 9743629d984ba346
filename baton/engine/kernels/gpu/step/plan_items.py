"""The plan of a step's attention: its rows' items, by one program for each cache group."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.engine.kernels.gpu.attention.items import (
    ITEM_BEGIN,
    ITEM_DEPTH,
    ITEM_END,
    ITEM_FIRST,
    ITEM_PARTS,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_ROWS,
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
    row_depth,
    count,
    items,
    window,
    wanted,
    shortest,
    wave,
    ROWS_POWER: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
    PER_ITEM: tl.constexpr,
):
    """Cuts the rows by their `SplitPolicy`; FIXED 0: mode `fast`. The list holds all items: `fast` cuts no
    more than its policy's bound, and of parts of one length `begin` has run no row that does not fit.

    PER_ITEM rows of a slot at most, one after the other, are cut as one: from what the first one sees to the
    last one's token. `row_depth` int32 numbers the rows of a slot from 0; where PER_ITEM is 1 it is not read.
    """
    row = tl.arange(0, ROWS_POWER)
    rows = tl.load(control + ROWS).to(tl.int32)
    there = row < rows
    entry = row
    item_rows = tl.full((ROWS_POWER,), 1, tl.int32)
    if PER_ITEM > 1:
        depth = tl.load(row_depth + row, mask=there, other=0)
        there = there & (depth % PER_ITEM == 0)
        for more in tl.static_range(1, PER_ITEM):
            # A row of another slot has less depth.
            next_depth = tl.load(row_depth + row + more, mask=there & (row + more < rows), other=0)
            item_rows += (next_depth == depth + more).to(tl.int32)
        entry = tl.cumsum(there.to(tl.int32), 0) - 1
        rows = tl.sum(there.to(tl.int32), 0)
    position = tl.load(row_position + row, mask=there, other=0)
    slot = tl.load(row_slot + row, mask=there, other=0)
    start, span = item_span(position, window, TILE)
    span = tl.where(there, span + item_rows - 1, 0)
    if FIXED > 0:
        part = tl.zeros_like(span) + FIXED
    else:
        about = tl.maximum(shortest, tl.cdiv(tl.sum(span, 0), wanted))
        pieces = tl.maximum(tl.cdiv(span, about), 1)
        rest = rows % wave
        if (rows > wave) & (rest > 0):
            filling = tl.minimum(wave // rest, tl.cdiv(span, shortest))
            pieces = tl.where(entry >= rows - rest, tl.maximum(pieces, filling), pieces)
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
        tl.store(line + ITEM_END, tl.minimum(begin_at + part, position + item_rows), mask=mask)
        tl.store(line + ITEM_FIRST, first, mask=mask)
        tl.store(line + ITEM_PARTS, parts, mask=mask)
        if PER_ITEM > 1:
            tl.store(line + ITEM_ROWS, item_rows + depth * ITEM_DEPTH, mask=mask)
