"""Decode attention of several rows a slot: each slot's keys and values are read once for all its rows.

    q: norm (some families), rotary
    out = softmax(q · Kᵀ · scale) · V      over a row's positions (p - window, p]

The rows of a slot lie side by side, at positions that follow one another. An item (`plan_items`) is a run of
whole tiles of the context of up to `rows_per_item` of them, whose query heads are one tile of the products.
The last item of rows has their own tokens. It takes them, and those of the slot's rows before them, from the
product's output, never from the cache, so that no program waits for a write. Items meet as those of
`split_attention` do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.attention.attend_tiles import attend_tiles, deliver
from baton.engine.kernels.gpu.attention.items import (
    ITEM_DEPTH,
    ITEM_ROWS,
    ITEM_WIDTH,
    AttentionTuning,
    Heads,
    Items,
    load_item,
)
from baton.engine.kernels.gpu.attention.kv_codes import codes_weights
from baton.engine.kernels.gpu.attention.launch import cache_arguments, item_arguments
from baton.engine.kernels.gpu.attention.new_token import load_heads, write_tokens
from baton.engine.kernels.gpu.attention.softmax_step import softmax_step

_TUNING = AttentionTuning()
# New tokens of a slot that a program takes at once: no fewer than the rows that a slot may have, and as many
# as the matrix units take.
_NEW = tl.constexpr(16)


@triton.jit
def _slot_attention(
    qkv,
    cache,
    scale_pairs,
    block_table,
    cos_rows,
    sin_rows,
    query_norm,
    key_norm,
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
            item, head, qkv, cache, scale_pairs, block_table, cos_rows, sin_rows, query_norm, key_norm, items,
            sums, scales, arrived, out, table_stride, layer_offset, block_stride, plane_stride,
            scale_layer_offset, scale_block_stride, scale, eps, window, HEADS, KV_HEADS, DIM, DIM_PADDED,
            GROUP, ROWS, QUERIES, WINDOWED, BLOCK_TOKENS, TILE, QK_NORM, UPCAST, STAGES, CODES,
        )  # fmt: skip


@triton.jit
def _attend_item(
    item, head, qkv, cache, scale_pairs, block_table, cos_rows, sin_rows, query_norm, key_norm, items, sums,
    scales, arrived, out, table_stride, layer_offset, block_stride, plane_stride, scale_layer_offset,
    scale_block_stride, scale, eps, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, QK_NORM: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Attends one item for one KV head, all rows and query heads of its group as one tile of QUERIES."""
    line = items + item * ITEM_WIDTH
    row, slot, position, begin, end, first, parts = load_item(line)
    there_are = tl.load(line + ITEM_ROWS)
    rows = there_are % ITEM_DEPTH
    before = there_are // ITEM_DEPTH
    # The slot's first new token: the cache has all that is older.
    new = position - before
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
    q = load_heads(
        qkv + vectors[:, None], there, cos, sin, query_norm, eps, DIM, DIM_PADDED, QK_NORM
    ).to(wide)  # fmt: skip

    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attn_out = tl.zeros((QUERIES, DIM_PADDED), tl.float32)
    positions = position + query // GROUP
    layer = cache + layer_offset + head * (BLOCK_TOKENS * DIM)
    layer_pairs = scale_pairs + scale_layer_offset + head * BLOCK_TOKENS
    if end == position + rows:
        number = tl.arange(0, _NEW)
        known = number < before + rows
        token_row = row - before + number
        token_turn = token_row[:, None] * half + (d % half)[None, :]
        token_turned = known[:, None] & (d < DIM)[None, :]
        k, v, k_scales, v_scales = write_tokens(
            qkv + token_row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM), new + number, known,
            known & (number >= before), head, layer, layer_pairs, table, block_stride, plane_stride,
            scale_block_stride, tl.load(cos_rows + token_turn, mask=token_turned, other=0.0),
            tl.load(sin_rows + token_turn, mask=token_turned, other=0.0), key_norm, eps,
            HEADS, KV_HEADS, DIM, DIM_PADDED, BLOCK_TOKENS, QK_NORM, CODES,
        )  # fmt: skip
        shown = known[None, :] & ((new + number)[None, :] <= positions[:, None])
        if WINDOWED:
            shown = shown & ((new + number)[None, :] > positions[:, None] - window)
        scores = tl.dot(q, tl.trans(k.to(wide)), input_precision="ieee") * scale
        if CODES:
            scores = tl.where(shown, scores * k_scales[None, :], float("-inf"))
            highest, _fade, weights, total = codes_weights(scores, v_scales, highest)
            attn_out = tl.dot(weights.to(wide), v.to(wide), attn_out, input_precision="ieee")
        else:
            scores = tl.where(shown, scores, float("-inf"))
            highest, total, attn_out = softmax_step(scores, v.to(wide), highest, total, attn_out)

    highest, total, attn_out = attend_tiles(
        q, positions, highest, total, attn_out, layer, layer_pairs, table, next_block,
        begin, tl.minimum(end, new), position + rows - 1, tl.maximum(position - window + 1, 0),
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
    """Attends for several rows a slot: qkv [R, (heads + 2 kv heads) · dim] → out [R, heads · dim]; writes the
    rows' k, v into `cache`. `items`: of rows by slot, 16 of a slot at most. `programs` of each KV head do
    them, one after the other where there are more; None: as many as the list is long. The rest as in
    `split_attention`. Raises ValueError for shapes that do not fit, and for items of one row."""
    rows = items.rows_per_item
    if rows < 2:
        raise ValueError("items of one row are split_attention's")
    tuning = tuning or _TUNING
    _slot_attention[(heads.kv_heads, min(items.items.shape[0], programs or 1 << 30))](
        query_norm=qkv if norms is None else norms[0],
        key_norm=qkv if norms is None else norms[1],
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
