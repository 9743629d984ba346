"""The parts that kernels of decode attention share: the tiles of keys and values of one item, and the
combining of items.

A program does one item for one KV head. Its queries are the heads of a group, of one row of activations or of
ROWS rows, one row's heads after the other's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.kv_codes import codes_weights, even_odd, unpacked
from baton.engine.kernels.gpu.attention.softmax_step import softmax_step


@triton.jit
def query_offsets(query, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Number of vectors from a program's first query to each of its queries, in arrays [rows, HEADS, dim]."""
    if ROWS == 1:
        return query
    else:
        return query // GROUP * HEADS + query % GROUP


@triton.jit
def attend_tiles(
    q,
    positions,
    highest,
    total,
    attn_out,
    layer,
    layer_pairs,
    table,
    next_block,
    begin,
    stop,
    last,
    first_seen,
    block_stride,
    plane_stride,
    pair_block_stride,
    scale,
    window,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    CODES: tl.constexpr,
):
    """q [QUERIES, DIM_PADDED] attends to the tokens begin:stop from `first_seen` on, a tile at a time →
    highest, total, attn_out as `softmax_step` has them, with these tokens in them.

    `layer`, `layer_pairs`: the KV head's part of the cache and of its scales in block 0; `table`: the slot's;
    `next_block`: that of `begin`; `last`: the last position whose block the table has. With several ROWS
    `positions` [QUERIES] are those of the queries' rows, none of them before `stop`, each of which sees its
    window; WINDOWED False: all tokens.
    """
    wide: tl.constexpr = q.dtype
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < DIM
    n = tl.arange(0, TILE)
    if CODES:
        pair = tl.arange(0, DIM_PADDED // 2)
        pair_values = (layer + plane_stride).to(tl.pointer_type(tl.int16))
        # Sums of even and of odd dimensions; what came before them fades by `kept` at the end.
        even_out = tl.zeros((QUERIES, DIM_PADDED // 2), tl.float32)
        odd_out = tl.zeros((QUERIES, DIM_PADDED // 2), tl.float32)
        kept = tl.full((QUERIES,), 1.0, tl.float32)
    for start in tl.range(begin, stop, TILE, num_stages=STAGES):
        t = start + n
        seen = (t < stop) & (t >= first_seen)
        if BLOCK_TOKENS % TILE == 0:
            block = next_block.to(tl.int64)
            next_block = tl.load(table + tl.minimum(start + TILE, last) // BLOCK_TOKENS)
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
        shown = seen[None, :]
        if ROWS > 1 and WINDOWED:
            shown = shown & (t[None, :] > positions[:, None] - window)
        if CODES:
            place = layer_pairs + block * pair_block_stride + in_block
            k_scales, v_scales = unpacked(tl.load(place, mask=seen, other=0))
            scores = tl.where(shown, scores * k_scales[None, :], float("-inf"))
            highest, fade, weights, added = codes_weights(scores, v_scales, highest)
            total = total * fade + added
            kept *= fade
            v_even, v_odd = even_odd(v_pairs, wide)
            weights = weights.to(wide)
            even_out = tl.dot(weights, v_even, even_out * fade[:, None], input_precision="ieee")
            odd_out = tl.dot(weights, v_odd, odd_out * fade[:, None], input_precision="ieee")
        else:
            scores = tl.where(shown, scores, float("-inf"))
            highest, total, attn_out = softmax_step(scores, v, highest, total, attn_out)
    if CODES:
        attn_out = attn_out * kept[:, None] + tl.join(even_out, odd_out).reshape(QUERIES, DIM_PADDED)
    return highest, total, attn_out


@triton.jit
def _quotient(attn_out, total, there, ROWS: tl.constexpr):
    if ROWS > 1:
        total = tl.where(there, total, 1.0)  # rows that an item lacks may see nothing
    return attn_out / total[:, None]


@triton.jit
def deliver(
    out,
    sums,
    scales,
    arrived,
    highest,
    total,
    attn_out,
    item,
    first,
    parts,
    row,
    head,
    queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERIES_POWER: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Writes the result of an item that is alone, else its part; the program that arrives last joins them.

    `row`: the first of the item's rows; `queries` of the QUERIES are there. sums [I, ROWS · HEADS, DIM],
    scales [I, ROWS · HEADS, 2]. For one row: QUERIES_POWER is the least power of two that has room for its
    queries, AHEAD how many parts are loaded at once where they are joined.
    """
    d = tl.arange(0, DIM_PADDED)
    query = tl.arange(0, QUERIES)
    offsets = query_offsets(query, HEADS, GROUP, ROWS)
    out_rows = row.to(tl.int64) * HEADS + head * GROUP + offsets
    out_mask = (query < queries)[:, None] & (d < DIM)[None, :]
    if parts == 1:
        result = _quotient(attn_out, total, query < queries, ROWS)
        tl.store(out + out_rows[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=out_mask)
    else:
        part_rows = item * (ROWS * HEADS) + head * GROUP + offsets
        tl.store(sums + part_rows[:, None] * DIM + d[None, :], attn_out, mask=out_mask)
        tl.store(scales + part_rows * 2, highest, mask=query < queries)
        tl.store(scales + part_rows * 2 + 1, total, mask=query < queries)
        if ON_CHIP:
            tl.debug_barrier()
        before = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel")
        if before == parts - 1:
            if ROWS == 1:
                _combine(
                    sums, scales, out, first, parts, row, head,
                    HEADS, DIM, DIM_PADDED, GROUP, QUERIES_POWER, AHEAD,
                )  # fmt: skip
            else:
                _combine_rows(
                    sums, scales, out, first, parts, row, head, queries,
                    HEADS, DIM, DIM_PADDED, GROUP, ROWS, QUERIES,
                )  # fmt: skip
            tl.store(arrived + row * KV_HEADS + head, 0)


@triton.jit
def _add_part(peaks, counts, values, highest, total, attn_out):
    """Adds a part, its highest scores `peaks`, sums of weights `counts` [queries] and weighted sums `values`
    [queries, dim] → highest, total, attn_out as `softmax_step` has them, with it."""
    higher = tl.maximum(highest, peaks)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(highest - base)
    weights = tl.exp2(peaks - base)
    return higher, total * fade + counts * weights, attn_out * fade[:, None] + values * weights[:, None]


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
    AHEAD: tl.constexpr,
):
    """Joins the partial results of one row and KV head, part after part; AHEAD parts are loaded before the
    first of them is added. A tile of several parts would be summed over the warps, which takes longer than
    the parts' own tokens."""
    d = tl.arange(0, DIM_PADDED)
    g = tl.arange(0, GROUP_POWER)
    there = g < GROUP
    mask = there[:, None] & (d < DIM)[None, :]
    offsets = head * GROUP + g
    highest = tl.full((GROUP_POWER,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POWER,), tl.float32)
    attn_out = tl.zeros((GROUP_POWER, DIM_PADDED), tl.float32)
    for begin in range(0, parts, AHEAD):
        for ahead in tl.static_range(AHEAD):
            # Behind the last part it is loaded once more, and has no weight.
            part = tl.minimum(begin + ahead, parts - 1)
            rows = (first + part) * HEADS + offsets
            # Past the first-level cache: another multiprocessor has written them.
            peaks = tl.load(scales + rows * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            counts = tl.load(scales + rows * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            values = tl.load(
                sums + rows[:, None] * DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"
            )
            peaks = tl.where(part < begin + ahead, float("-inf"), peaks)
            highest, total, attn_out = _add_part(peaks, counts, values, highest, total, attn_out)
    result = attn_out / total[:, None]
    rows = row.to(tl.int64) * HEADS + offsets
    tl.store(out + rows[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_rows(
    sums,
    scales,
    out,
    first,
    parts,
    row,
    head,
    queries,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The same for several rows, whose partial results are as many as registers hold: two parts' are loaded
    before the first is added."""
    d = tl.arange(0, DIM_PADDED)
    query = tl.arange(0, QUERIES)
    there = query < queries
    mask = there[:, None] & (d < DIM)[None, :]
    offsets = head * GROUP + query_offsets(query, HEADS, GROUP, ROWS)
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    attn_out = tl.zeros((QUERIES, DIM_PADDED), tl.float32)
    for part in tl.range(0, parts, loop_unroll_factor=2):
        rows = (first + part) * (ROWS * HEADS) + offsets
        peaks = tl.load(scales + rows * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        counts = tl.load(scales + rows * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(sums + rows[:, None] * DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        highest, total, attn_out = _add_part(peaks, counts, values, highest, total, attn_out)
    result = _quotient(attn_out, total, there, ROWS)
    rows = row.to(tl.int64) * HEADS + offsets
    tl.store(out + rows[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=mask)
