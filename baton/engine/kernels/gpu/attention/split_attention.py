"""Decode attention over the paged cache: one new token a row, split over the chip, one node a layer.

    q, k: norm (some families), rotary; the new k, v go into the cache
    out = softmax(q · Kᵀ · scale) · V      over positions (p - window, p]

The work of a layer is a list of items (`plan_items`): a run of whole tiles of one row's context. A program
does one item for one KV head with all query heads of its group, so K and V are read once. The item that holds
the new token takes it from the product's output, never from the cache, so that no program waits for a write.
A row of several items is combined by the program that arrives last, in the order of the items, whichever it
is, so a row's result depends on its items alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIRST,
    ITEM_PARTS,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_SLOT,
    ITEM_WIDTH,
    TILE,
    AttentionTuning,
    Heads,
    Items,
    check_cache,
    check_table,
    scale_pairs,
)
from baton.engine.kernels.gpu.attention.kv_codes import (
    codes_of,
    codes_weights,
    even_odd,
    packed,
    scales_of,
    stored,
    unpacked,
    values_of,
)
from baton.engine.kernels.gpu.attention.softmax_step import softmax_step

_TUNING = AttentionTuning()
# Partial results that a combining program takes at once.
_COMBINED = 8


@triton.jit
def _rotated(x, partner, cos, sin, low):
    """(a·cos - b·sin, b·cos + a·sin); `partner` is the other half, `low` marks the first."""
    return x * cos + tl.where(low, -partner, partner) * sin


@triton.jit
def _normed(x, weight, eps, DIM: tl.constexpr, dtype: tl.constexpr, ROUNDS: tl.constexpr):
    """RMSNorm over the last dimension of a 2-D tile; ROUNDS: before the weight multiplies it, too."""
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    if ROUNDS:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight).to(dtype).to(tl.float32)


@triton.jit
def _quantised(x, place, in_dim):
    """Writes the codes of the vector x [1, dim] to the cache → what they stand for, and their scale [1], in
    float32."""
    x = x.to(tl.float32)
    scales = scales_of(tl.max(tl.abs(x), 1))
    codes = codes_of(x, scales)
    tl.store(place, stored(codes), mask=in_dim[None, :])
    return values_of(codes, scales), scales


@triton.jit
def _split_attention(
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
    GROUP_PADDED: tl.constexpr,
    GROUP_POWER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    COMBINED: tl.constexpr,
    CODES: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    line = items + item * ITEM_WIDTH
    row = tl.load(line + ITEM_ROW)
    slot = tl.load(line + ITEM_SLOT)
    position = tl.load(line + ITEM_POSITION)
    begin = tl.load(line + ITEM_BEGIN)
    end = tl.load(line + ITEM_END)
    first = tl.load(line + ITEM_FIRST)
    parts = tl.load(line + ITEM_PARTS)
    if item >= tl.load(item_count):
        return
    table = block_table + slot.to(tl.int64) * table_stride
    # Read a tile ahead: a copy whose address waits for a load of its own pass is not kept in flight.
    next_block = tl.load(table + begin // BLOCK_TOKENS)
    last_block = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)

    dtype: tl.constexpr = qkv.dtype.element_ty
    # The dtype of the products' operands. Codes become float16 in one instruction, bfloat16 in many.
    wide: tl.constexpr = tl.float32 if UPCAST else (tl.float16 if CODES else dtype)
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < DIM
    low = d < half
    partner = tl.where(low, d + half, d - half)
    g = tl.arange(0, GROUP_PADDED)
    cos = tl.load(cos_rows + row * half + d % half, mask=in_dim, other=0.0)
    sin = tl.load(sin_rows + row * half + d % half, mask=in_dim, other=0.0)

    mine = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    q_rows = mine + (head * GROUP + g)[:, None] * DIM
    q_mask = (g < GROUP)[:, None] & in_dim[None, :]
    q = tl.load(q_rows + d[None, :], mask=q_mask, other=0.0).to(tl.float32)
    q_partner = tl.load(q_rows + partner[None, :], mask=q_mask, other=0.0).to(tl.float32)
    if QK_NORM:
        weight = tl.load(query_norm + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        weight_partner = tl.load(query_norm + partner, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        q = _normed(q, weight, eps, DIM, dtype, query_norm.dtype.element_ty == dtype)
        q_partner = _normed(q_partner, weight_partner, eps, DIM, dtype, query_norm.dtype.element_ty == dtype)
    q = _rotated(q, q_partner, cos[None, :], sin[None, :], low[None, :]).to(dtype).to(wide)

    highest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    attn_out = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    layer = cache + layer_offset + head * (BLOCK_TOKENS * DIM)
    layer_scales = scale_pairs + scale_layer_offset + head * BLOCK_TOKENS
    if end > position:
        k_row = mine + (HEADS + head) * DIM
        k = tl.load(k_row + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        k_partner = tl.load(k_row + partner, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        if QK_NORM:
            weight = tl.load(key_norm + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
            weight_partner = tl.load(key_norm + partner, mask=in_dim, other=0.0).to(tl.float32)[None, :]
            k = _normed(k, weight, eps, DIM, dtype, query_norm.dtype.element_ty == dtype)
            k_partner = _normed(
                k_partner, weight_partner, eps, DIM, dtype, query_norm.dtype.element_ty == dtype
            )
        k = _rotated(k, k_partner, cos[None, :], sin[None, :], low[None, :]).to(dtype)
        v = tl.load(mine + (HEADS + KV_HEADS + head) * DIM + d, mask=in_dim, other=0.0)[None, :]
        place = layer + last_block * block_stride + (position % BLOCK_TOKENS) * DIM + d[None, :]
        if CODES:
            k, k_scales = _quantised(k, place, in_dim)
            v, v_scales = _quantised(v, place + plane_stride, in_dim)
            scales_place = layer_scales + last_block * scale_block_stride + position % BLOCK_TOKENS
            tl.store(scales_place + tl.arange(0, 1), packed(k_scales, v_scales))
        else:
            tl.store(place, k, mask=in_dim[None, :])
            tl.store(place + plane_stride, v, mask=in_dim[None, :])
        highest = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        total += 1.0
        attn_out += v.to(tl.float32)

    first_seen = tl.maximum(position - window + 1, 0)
    stop = tl.minimum(end, position)
    n = tl.arange(0, TILE)
    if CODES:
        pair = tl.arange(0, DIM_PADDED // 2)
        pair_values = (layer + plane_stride).to(tl.pointer_type(tl.int16))
        even_out = tl.zeros((GROUP_PADDED, DIM_PADDED // 2), tl.float32)
        odd_out = tl.zeros((GROUP_PADDED, DIM_PADDED // 2), tl.float32)
    for start in tl.range(begin, stop, TILE, num_stages=STAGES):
        t = start + n
        seen = (t < stop) & (t >= first_seen)
        if BLOCK_TOKENS % TILE == 0:
            block = next_block.to(tl.int64)
            next_block = tl.load(table + tl.minimum(start + TILE, position) // BLOCK_TOKENS)
            in_block = start % BLOCK_TOKENS + n
        else:
            block = tl.load(table + t // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
            in_block = t % BLOCK_TOKENS
        offsets = block * block_stride + in_block * DIM
        places = layer + offsets[:, None] + d[None, :]
        mask = seen[:, None] & in_dim[None, :]
        k = tl.load(places, mask=mask, other=0.0).to(wide)
        if CODES:
            values = pair_values + (offsets // 2)[:, None] + pair[None, :]
            v_pairs = tl.load(values, mask=seen[:, None] & (pair < half)[None, :], other=0)
        else:
            v = tl.load(places + plane_stride, mask=mask, other=0.0).to(wide)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CODES:
            place = layer_scales + block * scale_block_stride + in_block
            k_scales, v_scales = unpacked(tl.load(place, mask=seen, other=0))
            scores = tl.where(seen[None, :], scores * k_scales[None, :], float("-inf"))
            highest, fade, weights, added = codes_weights(scores, v_scales, highest)
            total = total * fade + added
            v_even, v_odd = even_odd(v_pairs, wide)
            weights = weights.to(wide)
            even_out = tl.dot(weights, v_even, even_out * fade[:, None], input_precision="ieee")
            odd_out = tl.dot(weights, v_odd, odd_out * fade[:, None], input_precision="ieee")
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
            highest, total, attn_out = softmax_step(scores, v, highest, total, attn_out)
    if CODES:
        attn_out += tl.join(even_out, odd_out).reshape(GROUP_PADDED, DIM_PADDED)

    out_rows = row.to(tl.int64) * HEADS + head * GROUP + g
    out_mask = (g < GROUP)[:, None] & in_dim[None, :]
    if parts == 1:
        result = attn_out / total[:, None]
        tl.store(out + out_rows[:, None] * DIM + d[None, :], result.to(dtype), mask=out_mask)
    else:
        part_rows = item * HEADS + head * GROUP + g
        tl.store(sums + part_rows[:, None] * DIM + d[None, :], attn_out, mask=out_mask)
        tl.store(scales + part_rows * 2, highest, mask=g < GROUP)
        tl.store(scales + part_rows * 2 + 1, total, mask=g < GROUP)
        if ON_CHIP:
            tl.debug_barrier()
        before = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel")
        if before == parts - 1:
            _combine(
                sums, scales, out, first, parts, row, head,
                HEADS, DIM, DIM_PADDED, GROUP, GROUP_POWER, COMBINED,
            )  # fmt: skip
            tl.store(arrived + row * KV_HEADS + head, 0)


@triton.jit
def _combine(
    sums,
    scales,
    out,
    first,
    parts,
    row,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POWER: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Joins the partial results of one row and KV head, COMBINED at a time."""
    d = tl.arange(0, DIM_PADDED)
    g = tl.arange(0, GROUP_POWER)
    i = tl.arange(0, COMBINED)
    highest = tl.full((GROUP_POWER,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POWER,), tl.float32)
    attn_out = tl.zeros((GROUP_POWER, DIM_PADDED), tl.float32)
    for part in range(0, parts, COMBINED):
        there = ((part + i) < parts)[:, None] & (g < GROUP)[None, :]
        rows = (first + part + i)[:, None] * HEADS + head * GROUP + g[None, :]
        # Past the first-level cache: another multiprocessor has written them.
        peaks = tl.load(scales + rows * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        counts = tl.load(scales + rows * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(
            sums + rows[:, :, None] * DIM + d[None, None, :],
            mask=there[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, tl.max(peaks, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(highest - base)
        weights = tl.exp2(peaks - base[None, :])
        total = total * fade + tl.sum(counts * weights, 0)
        attn_out = attn_out * fade[:, None] + tl.sum(values * weights[:, :, None], 0)
        highest = higher
    result = attn_out / total[:, None]
    rows = row.to(tl.int64) * HEADS + head * GROUP + g
    mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    tl.store(out + rows[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=mask)


def split_attention(
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
    most_items: int | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """qkv [R, (heads + 2 kv heads) · dim] → out [R, heads · dim]; writes the rows' k, v into `cache`.

    `cache` is the cache group's tensor [blocks, layers, planes, kv heads, block tokens, dim] of qkv's dtype
    (float32, bfloat16 or float16), or of codes with their scales `kv_scales`: the rows' k, v are then
    quantised, and read as the cache has them. `layer` counts within the group; block_table [slots, W] int32;
    `rotary`: cos, sin [R, dim / 2] float32; `norms`: weights of query and key norm; `most_items` bounds the
    items there can be, else the list's length does. Rows without items are not written. Raises ValueError
    for shapes that do not fit.
    """
    _check(out, qkv, cache, kv_scales, block_table, rotary, items, heads)
    pairs, *strides = scale_pairs(cache, kv_scales, layer)
    group = heads.heads // heads.kv_heads
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    _split_attention[(heads.kv_heads, items.items.shape[0] if most_items is None else most_items)](
        qkv,
        cache,
        pairs,
        block_table,
        *rotary,
        query_norm,
        key_norm,
        items.count,
        items.items,
        items.sums,
        items.scales,
        items.arrived,
        out,
        block_table.stride(0),
        layer * cache.stride(1),
        cache.stride(0),
        cache.stride(2),
        *strides,
        heads.log2_scale,
        heads.norm_eps,
        heads.seen,
        HEADS=heads.heads,
        KV_HEADS=heads.kv_heads,
        DIM=heads.dim,
        DIM_PADDED=max(16, triton.next_power_of_2(heads.dim)),
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        GROUP_POWER=triton.next_power_of_2(group),
        BLOCK_TOKENS=cache.shape[4],
        TILE=TILE,
        QK_NORM=norms is not None,
        UPCAST=qkv.dtype == torch.float32 or not ON_CHIP.value,
        STAGES=(tuning or _TUNING).stages,
        COMBINED=_COMBINED,
        CODES=kv_scales is not None,
        num_warps=(tuning or _TUNING).warps,
        maxnreg=(tuning or _TUNING).registers,
    )


def _check(
    out: Tensor,
    qkv: Tensor,
    cache: Tensor,
    kv_scales: Tensor | None,
    block_table: Tensor,
    rotary: tuple[Tensor, Tensor],
    items: Items,
    heads: Heads,
) -> None:
    rows = qkv.shape[0]
    wanted = {
        "qkv": (tuple(qkv.shape), (rows, (heads.heads + 2 * heads.kv_heads) * heads.dim)),
        "out": (tuple(out.shape), (rows, heads.heads * heads.dim)),
        "rotary": (tuple(rotary[0].shape), (rows, heads.dim // 2)),
        "items": (tuple(items.sums.shape[1:]), (heads.heads, heads.dim)),
    }
    for name, (got, expected) in wanted.items():
        if got != expected:
            raise ValueError(f"{name} is {got}, expected {expected}")
    if items.arrived.shape[0] < rows:
        raise ValueError(f"the items are of {items.arrived.shape[0]} rows, qkv has {rows}")
    if not (qkv.is_contiguous() and out.is_contiguous()):
        raise ValueError("qkv and out must be contiguous")
    check_cache(cache, kv_scales, qkv, heads)
    check_table(block_table)
