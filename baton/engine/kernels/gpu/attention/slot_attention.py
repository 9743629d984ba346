"""Decode attention of several rows a slot: each slot's keys and values are read once for all its rows.

    q: norm (some families), rotary
    out = softmax(q · Kᵀ · scale) · V      over a row's positions (p - window, p]

The rows of a slot lie side by side, at positions that follow one another. An item (`plan_items`) is a run of
whole tiles of the context of up to `rows_per_item` of them, whose query heads are one tile of the products.
The rows' own keys and values are read from the cache: `write_kv` has put them there. Items meet as those of
`split_attention` do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.attention.attend_tiles import attend_tiles, deliver
from baton.engine.kernels.gpu.attention.items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIRST,
    ITEM_PARTS,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_ROWS,
    ITEM_SLOT,
    ITEM_WIDTH,
    AttentionTuning,
    Heads,
    Items,
)
from baton.engine.kernels.gpu.attention.launch import cache_arguments, item_arguments
from baton.engine.kernels.gpu.attention.new_token import load_queries

_TUNING = AttentionTuning()


@triton.jit
def _slot_attention(
    qkv,
    cache,
    scale_pairs,
    block_table,
    cos_rows,
    sin_rows,
    query_norm,
    item_count,
    items,
    sums,
    scales,
    arrived,
    out,
    table_stride,
    layer_offset,
    block_stride,
    plane_stride,
    scale_layer_offset,
    scale_block_stride,
    scale,
    eps,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    CODES: tl.constexpr,
):
    head = tl.program_id(0)
    # Programs without an item would hold room on a multiprocessor for as long as it takes to find that out.
    for item in range(tl.program_id(1), tl.load(item_count), tl.num_programs(1)):
        _attend_item(
            item, head, qkv, cache, scale_pairs, block_table, cos_rows, sin_rows, query_norm, items, sums,
            scales, arrived, out, table_stride, layer_offset, block_stride, plane_stride, scale_layer_offset,
            scale_block_stride, scale, eps, window, HEADS, KV_HEADS, DIM, DIM_PADDED, GROUP, ROWS, QUERIES,
            WINDOWED, BLOCK_TOKENS, TILE, QK_NORM, UPCAST, STAGES, CODES,
        )  # fmt: skip


@triton.jit
def _attend_item(
    item, head, qkv, cache, scale_pairs, block_table, cos_rows, sin_rows, query_norm, items, sums, scales,
    arrived, out, table_stride, layer_offset, block_stride, plane_stride, scale_layer_offset,
    scale_block_stride, scale, eps, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, QK_NORM: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Attends one item for one KV head, all rows and query heads of its group as one tile of QUERIES."""
    line = items + item * ITEM_WIDTH
    row = tl.load(line + ITEM_ROW)
    slot = tl.load(line + ITEM_SLOT)
    position = tl.load(line + ITEM_POSITION)
    begin = tl.load(line + ITEM_BEGIN)
    end = tl.load(line + ITEM_END)
    first = tl.load(line + ITEM_FIRST)
    parts = tl.load(line + ITEM_PARTS)
    rows = tl.load(line + ITEM_ROWS)
    table = block_table + slot.to(tl.int64) * table_stride
    next_block = tl.load(table + begin // BLOCK_TOKENS)

    wide: tl.constexpr = tl.float32 if UPCAST else (tl.float16 if CODES else qkv.dtype.element_ty)
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    query = tl.arange(0, QUERIES)
    there = query < rows * GROUP
    row_of = row + query // GROUP
    turn = row_of[:, None] * half + (d % half)[None, :]
    turned = there[:, None] & (d < DIM)[None, :]
    cos = tl.load(cos_rows + turn, mask=turned, other=0.0)
    sin = tl.load(sin_rows + turn, mask=turned, other=0.0)
    vectors = row_of.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM) + (head * GROUP + query % GROUP) * DIM
    q = load_queries(
        qkv + vectors[:, None], there, cos, sin, query_norm, eps, DIM, DIM_PADDED, QK_NORM
    ).to(wide)  # fmt: skip

    highest, total, attn_out = attend_tiles(
        q, position + query // GROUP,
        tl.full((QUERIES,), float("-inf"), tl.float32),
        tl.zeros((QUERIES,), tl.float32),
        tl.zeros((QUERIES, DIM_PADDED), tl.float32),
        cache + layer_offset + head * (BLOCK_TOKENS * DIM),
        scale_pairs + scale_layer_offset + head * BLOCK_TOKENS,
        table, next_block, begin, end, position + rows - 1, tl.maximum(position - window + 1, 0),
        block_stride, plane_stride, scale_block_stride, scale, window,
        DIM, DIM_PADDED, QUERIES, ROWS, WINDOWED, BLOCK_TOKENS, TILE, STAGES, CODES,
    )  # fmt: skip
    deliver(
        out, sums, scales, arrived, highest, total, attn_out, item, first, parts, row, head, rows * GROUP,
        HEADS, KV_HEADS, DIM, DIM_PADDED, GROUP, ROWS, QUERIES, QUERIES, 1,
    )  # fmt: skip


def slot_attention(
    out: Tensor,
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    block_table: Tensor,
    rotary: tuple[Tensor, Tensor],
    items: Items,
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None = None,
    tuning: AttentionTuning | None = None,
    programs: int | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Attends for several rows a slot: qkv [R, (heads + 2 kv heads) · dim] → out [R, heads · dim], over a
    cache that has the rows' own keys and values. `items`: of rows by slot. `programs` of each KV head do
    them, one after the other where there are more; None: as many as the list is long. The rest as in
    `split_attention`. Raises ValueError for shapes that do not fit, and for items of one row."""
    rows = items.rows_per_item
    if rows < 2:
        raise ValueError("items of one row are split_attention's")
    tuning = tuning or _TUNING
    _slot_attention[(heads.kv_heads, min(items.items.shape[0], programs or 1 << 30))](
        query_norm=qkv if norms is None else norms[0],
        ROWS=rows,
        QUERIES=max(16, triton.next_power_of_2(rows * heads.group)),
        WINDOWED=heads.window is not None,
        TILE=tuning.tile,
        STAGES=tuning.stages_of(heads.dim * cache.element_size()),
        num_warps=tuning.warps,
        maxnreg=tuning.registers,
        **cache_arguments(qkv, cache, layer, block_table, rotary, heads, norms, kv_scales),
        **item_arguments(out, qkv, items, heads, rows),
    )
