"""Attention of prompt rows over the paged cache: any mixture of chunks in one node, whatever their lengths.

    out = softmax(q · Kᵀ · scale) · V      over keys begin <= t < end, t <= p, t > p - window

A program does one item for one KV head: a run of one sequence's rows, the heads of the group beside one
another, so that K and V are read once for all of them. Tiles of keys that every row sees come first, in a
loop without masks; then those at the edges. Each is one flat loop: in one around another no loads would be
kept in flight. The keys are all read from the cache, so the rows' own must be there already. An item of
zeros has no rows and no keys: its program does nothing, so that a graph may have more of them than a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.attention.kv_codes import codes_weights, unpacked
from baton.engine.kernels.gpu.attention.launch import check_cache, check_table, scale_pairs
from baton.engine.kernels.gpu.attention.prompt_items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_INTO,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_ROWS,
    ITEM_TABLE,
    ITEM_WIDTH,
    PromptTuning,
    power_of_two,
)
from baton.engine.kernels.gpu.attention.softmax_step import softmax_step

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _places(table, t, ahead, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, block_stride, DIM: tl.constexpr):
    """Offsets of a tile's tokens within a layer and head; `ahead` is the block of its first, where all of
    the tile lies in that block."""
    if BLOCK_TOKENS % TILE == 0:
        return ahead.to(tl.int64) * block_stride + t % BLOCK_TOKENS * DIM
    else:
        return tl.load(table + t // BLOCK_TOKENS).to(tl.int64) * block_stride + t % BLOCK_TOKENS * DIM


@triton.jit(do_not_specialize=["lse_stride"])
def _prompt_attention(
    qkv,
    cache,
    scale_pairs,
    tables,
    items,
    out,
    lse,
    lse_stride,
    table_stride,
    layer_offset,
    block_stride,
    plane_stride,
    scale_layer_offset,
    scale_block_stride,
    scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POWER: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WITH_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    CODES: tl.constexpr,
):
    head = tl.program_id(0)
    line = items + tl.program_id(1) * ITEM_WIDTH
    row = tl.load(line + ITEM_ROW)
    count = tl.load(line + ITEM_ROWS)
    position = tl.load(line + ITEM_POSITION)
    begin = tl.load(line + ITEM_BEGIN)
    end = tl.load(line + ITEM_END)
    into = tl.load(line + ITEM_INTO)
    table = tables + tl.load(line + ITEM_TABLE).to(tl.int64) * table_stride

    dtype: tl.constexpr = qkv.dtype.element_ty
    # The dtype of the products' operands. Codes become float16 in one instruction, bfloat16 in many.
    wide: tl.constexpr = tl.float32 if UPCAST else (tl.float16 if CODES else dtype)
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < DIM
    m = tl.arange(0, QUERIES)
    r, g = m // GROUP_POWER, m % GROUP_POWER
    real = (r < count) & (g < GROUP)
    # Rows behind the item's last see what that one sees; their results are not read.
    at = position + tl.minimum(r, count - 1)
    q_rows = (row + r).to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM) + (head * GROUP + g) * DIM
    q_mask = real[:, None] & in_dim[None, :]
    q = tl.load(qkv + q_rows[:, None] + d[None, :], mask=q_mask, other=0.0).to(wide)

    # Tiles first, first + TILE, … behind; of these every row sees full_begin to full_end in full.
    first = begin // TILE * TILE
    behind = tl.cdiv(end, TILE) * TILE
    seen_by_last = tl.maximum(begin, position + count - window)
    full_begin = tl.minimum(tl.cdiv(seen_by_last, TILE) * TILE, behind)
    full_end = tl.maximum(tl.minimum(position + 1, end) // TILE * TILE, full_begin)
    last_block = tl.maximum(end - 1, 0) // BLOCK_TOKENS

    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attn_out = tl.zeros((QUERIES, DIM_PADDED), tl.float32)
    keys = cache + layer_offset + head * (BLOCK_TOKENS * DIM)
    head_pairs = scale_pairs + scale_layer_offset + head * BLOCK_TOKENS
    n = tl.arange(0, TILE)

    # Read a tile ahead: a copy whose address waits for a load of its own pass is not kept in flight.
    ahead = tl.load(table + tl.minimum(full_begin // BLOCK_TOKENS, last_block))
    for start in tl.range(full_begin, full_end, TILE, num_stages=STAGES):
        offsets = _places(table, start + n, ahead, BLOCK_TOKENS, TILE, block_stride, DIM)
        scale_offsets = _places(table, start + n, ahead, BLOCK_TOKENS, TILE, scale_block_stride, 1)
        ahead = tl.load(table + tl.minimum((start + TILE) // BLOCK_TOKENS, last_block))
        places = keys + offsets[:, None] + d[None, :]
        if DIM == DIM_PADDED:
            k = tl.load(places)
            v = tl.load(places + plane_stride)
        else:
            k = tl.load(places, mask=in_dim[None, :], other=0.0)
            v = tl.load(places + plane_stride, mask=in_dim[None, :], other=0.0)
        if CODES:
            k_scales, v_scales = unpacked(tl.load(head_pairs + scale_offsets))
        k, v = k.to(wide), v.to(wide)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CODES:
            scores = scores * (k_scales * scale)[None, :]
            highest, fade, weights, added = codes_weights(scores, v_scales, highest)
            total = total * fade + added
            attn_out = tl.dot(weights.to(wide), v, attn_out * fade[:, None], input_precision="ieee")
        else:
            # `softmax_step` where every row sees every key: no mask, and the scale within the exponent.
            higher = tl.maximum(highest, tl.max(scores, 1) * scale)
            fade = tl.exp2(highest - higher)
            weights = tl.exp2(scores * scale - higher[:, None])
            total = total * fade + tl.sum(weights, 1)
            attn_out = attn_out * fade[:, None]
            attn_out = tl.dot(weights.to(v.dtype), v, attn_out, input_precision="ieee")
            highest = higher

    skipped = full_end - full_begin
    for tile in tl.range(first, behind - skipped, TILE, num_stages=1):
        t = tl.where(tile < full_begin, tile, tile + skipped) + n
        inside = (t >= begin) & (t < end)
        block = tl.load(table + tl.minimum(t // BLOCK_TOKENS, last_block)).to(tl.int64)
        places = keys + (block * block_stride + t % BLOCK_TOKENS * DIM)[:, None] + d[None, :]
        mask = inside[:, None] & in_dim[None, :]
        k = tl.load(places, mask=mask, other=0.0)
        v = tl.load(places + plane_stride, mask=mask, other=0.0)
        if CODES:
            pairs = head_pairs + block * scale_block_stride + t % BLOCK_TOKENS
            k_scales, v_scales = unpacked(tl.load(pairs, mask=inside, other=0))
        k, v = k.to(wide), v.to(wide)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CODES:
            scores = scores * k_scales[None, :]
        seen = inside[None, :] & (t[None, :] <= at[:, None]) & (t[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        if CODES:
            highest, fade, weights, added = codes_weights(scores, v_scales, highest)
            total = total * fade + added
            attn_out = tl.dot(weights.to(wide), v, attn_out * fade[:, None], input_precision="ieee")
        else:
            highest, total, attn_out = softmax_step(scores, v, highest, total, attn_out)

    out_rows = (into + r).to(tl.int64) * (HEADS * DIM) + (head * GROUP + g) * DIM
    result = (attn_out / tl.where(real, total, 1.0)[:, None]).to(dtype)
    tl.store(out + out_rows[:, None] + d[None, :], result, mask=real[:, None] & in_dim[None, :])
    if WITH_LSE:
        place = lse + (head * GROUP + g).to(tl.int64) * lse_stride + into + r
        tl.store(place, (highest + tl.log2(tl.where(real, total, 1.0))) * _LN2, mask=real)


def prompt_attention(
    out: Tensor,
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    tables: Tensor,
    items: Tensor,
    heads: Heads,
    tuning: PromptTuning,
    lse: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Attends for rows of prompts: qkv [N, (heads + 2 kv heads) · dim], q rotated → out [>= N, heads · dim],
    of the items' rows alone, where the items want them.

    `cache`: the cache group's tensor, of qkv's dtype (float32, bfloat16, float16) or of codes with their
    scales `kv_scales`, with every key and value in it that the items name; `layer` counts within the group.
    `tables` [B, W] int32; `items` [I, ITEM_WIDTH] int32, of at most `tuning.rows(heads)` rows each
    (`item_lines`). `lse` [heads, N of out or more] float32: takes the natural logarithm of each row's sum of
    exponentials. Raises ValueError for shapes that do not fit.
    """
    _check(out, qkv, cache, kv_scales, tables, items, heads, lse)
    if not items.shape[0]:
        return
    group = heads.heads // heads.kv_heads
    pairs, *strides = scale_pairs(cache, kv_scales, layer)
    _prompt_attention[(heads.kv_heads, items.shape[0])](
        qkv,
        cache,
        pairs,
        tables,
        items,
        out,
        out if lse is None else lse,
        0 if lse is None else lse.stride(0),
        tables.stride(0),
        layer * cache.stride(1),
        cache.stride(0),
        cache.stride(2),
        *strides,
        heads.log2_scale,
        heads.seen,
        HEADS=heads.heads,
        KV_HEADS=heads.kv_heads,
        DIM=heads.dim,
        DIM_PADDED=max(16, triton.next_power_of_2(heads.dim)),
        GROUP=group,
        GROUP_POWER=power_of_two(group),
        QUERIES=tuning.rows(heads) * power_of_two(group),
        BLOCK_TOKENS=cache.shape[4],
        TILE=tuning.tile,
        WITH_LSE=lse is not None,
        UPCAST=qkv.dtype == torch.float32 or not ON_CHIP.value,
        STAGES=tuning.stages,
        CODES=kv_scales is not None,
        num_warps=tuning.warps,
    )


def _check(
    out: Tensor,
    qkv: Tensor,
    cache: Tensor,
    kv_scales: Tensor | None,
    tables: Tensor,
    items: Tensor,
    heads: Heads,
    lse: Tensor | None,
) -> None:
    rows, width = out.shape
    wide = width + 2 * heads.kv_heads * heads.dim
    if width != heads.heads * heads.dim or qkv.shape[1] != wide or qkv.shape[0] > rows:
        raise ValueError(f"qkv {tuple(qkv.shape)} and out {tuple(out.shape)} do not fit {heads}")
    if not (qkv.is_contiguous() and out.is_contiguous() and items.is_contiguous()):
        raise ValueError("qkv, out and items must be contiguous")
    if lse is not None and (lse.shape[0] != heads.heads or lse.shape[1] < rows or lse.stride(1) != 1):
        raise ValueError(f"lse is {tuple(lse.shape)}, expected {heads.heads} rows of {rows}")
    check_cache(cache, kv_scales, qkv, heads)
    check_table(tables)
