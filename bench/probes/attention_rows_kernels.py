"""Kernels of decode attention with several rows a sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.softmax_step import softmax_step


@triton.jit
def _rotate(x, partner, cos, sin, low):
    return x * cos + tl.where(low, -partner, partner) * sin


@triton.jit
def write_keys(
    qkv, cache, table, cos_rows, sin_rows, slots, positions,
    table_stride, layer_offset, block_stride, plane_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the rotated key and the value of one row and KV head into its block."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM)
    low = d < half
    partner = tl.where(low, d + half, d - half)
    position = tl.load(positions + row)
    block = tl.load(table + tl.load(slots + row).to(tl.int64) * table_stride + position // BLOCK).to(tl.int64)
    cos = tl.load(cos_rows + row * half + d % half)
    sin = tl.load(sin_rows + row * half + d % half)
    mine = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    key = mine + (HEADS + head) * DIM
    k = _rotate(tl.load(key + d).to(tl.float32), tl.load(key + partner).to(tl.float32), cos, sin, low)
    v = tl.load(mine + (HEADS + KV_HEADS + head) * DIM + d)
    place = cache + layer_offset + block * block_stride + head * (BLOCK * DIM) + (position % BLOCK) * DIM + d
    tl.store(place, k.to(v.dtype))
    tl.store(place + plane_stride, v)


@triton.jit
def attend_rows(
    qkv, cache, table, cos_rows, sin_rows, items, sums, scales, arrived, out,
    table_stride, layer_offset, block_stride, plane_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr, FUSED: tl.constexpr,
    NEW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attends one item for one KV head, all rows and query heads of its group as one tile of QUERIES. An item
    is (slot, first row, rows, position of the first row, begin, end, first item, parts), int32 each."""
    head = tl.program_id(0)
    line = items + tl.program_id(1) * 8
    slot = tl.load(line)
    first_row = tl.load(line + 1)
    rows = tl.load(line + 2)
    position = tl.load(line + 3)
    begin = tl.load(line + 4)
    end = tl.load(line + 5)
    first = tl.load(line + 6)
    parts = tl.load(line + 7)
    blocks = table + slot.to(tl.int64) * table_stride
    dtype: tl.constexpr = qkv.dtype.element_ty
    wide: tl.constexpr = tl.float32 if UPCAST else dtype
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM)
    low = d < half
    partner = tl.where(low, d + half, d - half)
    m = tl.arange(0, QUERIES)
    r = m // GROUP
    there = r < rows
    row = first_row + r
    cos = tl.load(cos_rows + row[:, None] * half + (d % half)[None, :], mask=there[:, None], other=0.0)
    sin = tl.load(sin_rows + row[:, None] * half + (d % half)[None, :], mask=there[:, None], other=0.0)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    q_rows = qkv + row.to(tl.int64)[:, None] * width + (head * GROUP + m % GROUP)[:, None] * DIM
    q = tl.load(q_rows + d[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    q_partner = tl.load(q_rows + partner[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    q = _rotate(q, q_partner, cos, sin, low[None, :]).to(dtype).to(wide)

    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attn_out = tl.zeros((QUERIES, DIM), tl.float32)
    layer = cache + layer_offset + head * (BLOCK * DIM)
    n = tl.arange(0, TILE)
    stop = end
    if FUSED:
        stop = tl.minimum(end, position)
        if end > position:
            j = tl.arange(0, NEW)
            new = j < rows
            k_rows = qkv + (first_row + j).to(tl.int64)[:, None] * width + (HEADS + head) * DIM
            k_cos = tl.load(
                cos_rows + (first_row + j)[:, None] * half + (d % half)[None, :], mask=new[:, None], other=0.0
            )
            k_sin = tl.load(
                sin_rows + (first_row + j)[:, None] * half + (d % half)[None, :], mask=new[:, None], other=0.0
            )
            k = tl.load(k_rows + d[None, :], mask=new[:, None], other=0.0).to(tl.float32)
            k_partner = tl.load(k_rows + partner[None, :], mask=new[:, None], other=0.0).to(tl.float32)
            k = _rotate(k, k_partner, k_cos, k_sin, low[None, :]).to(dtype)
            v = tl.load(k_rows + KV_HEADS * DIM + d[None, :], mask=new[:, None], other=0.0)
            t = position + j
            block = tl.load(blocks + t // BLOCK, mask=new, other=0).to(tl.int64)
            places = layer + (block * block_stride + (t % BLOCK) * DIM)[:, None] + d[None, :]
            tl.store(places, k, mask=new[:, None])
            tl.store(places + plane_stride, v, mask=new[:, None])
            scores = tl.dot(q, tl.trans(k.to(wide)), input_precision="ieee") * scale
            scores = tl.where((j[None, :] <= r[:, None]) & new[None, :], scores, float("-inf"))
            highest, total, attn_out = softmax_step(scores, v.to(wide), highest, total, attn_out)
    next_block = tl.load(blocks + begin // BLOCK)
    last = tl.maximum(stop - 1, 0)
    for start in tl.range(begin, stop, TILE, num_stages=STAGES):
        t = start + n
        block = next_block.to(tl.int64)
        next_block = tl.load(blocks + tl.minimum(start + TILE, last) // BLOCK)
        places = layer + (block * block_stride + (start % BLOCK + n) * DIM)[:, None] + d[None, :]
        seen = t < stop
        k = tl.load(places, mask=seen[:, None], other=0.0).to(wide)
        v = tl.load(places + plane_stride, mask=seen[:, None], other=0.0).to(wide)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :] & (t[None, :] <= position + r[:, None]), scores, float("-inf"))
        highest, total, attn_out = softmax_step(scores, v, highest, total, attn_out)

    out_rows = row.to(tl.int64) * HEADS + head * GROUP + m % GROUP
    if parts == 1:
        result = attn_out / total[:, None]
        tl.store(out + out_rows[:, None] * DIM + d[None, :], result.to(dtype), mask=there[:, None])
    else:
        mine = (tl.program_id(1) * KV_HEADS + head) * QUERIES + m
        tl.store(sums + mine[:, None] * DIM + d[None, :], attn_out, mask=there[:, None])
        tl.store(scales + mine * 2, highest, mask=there)
        tl.store(scales + mine * 2 + 1, total, mask=there)
        if ON_CHIP:
            tl.debug_barrier()
        before = tl.atomic_add(arrived + slot * KV_HEADS + head, 1, sem="acq_rel")
        if before == parts - 1:
            highest = tl.full((QUERIES,), float("-inf"), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            attn_out = tl.zeros((QUERIES, DIM), tl.float32)
            for part in range(0, parts):
                place = ((first + part) * KV_HEADS + head) * QUERIES + m
                peaks = tl.load(scales + place * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                counts = tl.load(scales + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                values = tl.load(
                    sums + place[:, None] * DIM + d[None, :],
                    mask=there[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                higher = tl.maximum(highest, peaks)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                fade = tl.exp2(highest - base)
                weight = tl.exp2(peaks - base)
                total = total * fade + counts * weight
                attn_out = attn_out * fade[:, None] + values * weight[:, None]
                highest = higher
            result = attn_out / total[:, None]
            tl.store(out + out_rows[:, None] * DIM + d[None, :], result.to(dtype), mask=there[:, None])
            tl.store(arrived + slot * KV_HEADS + head, 0)
