"""Finishes the qkv product of prompt rows: q and k are normed (some families) and rotated in place, and k and
v go into the paged cache.

One node: a program does some rows of one head. Keys stay in the product too, since attention that needs no
cached token reads them there. Where the cache holds codes, k and v in the product become what the codes stand
for, rounded to its dtype, so that all attention sees the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import together
from baton.engine.kernels.gpu.attention.items import Heads
from baton.engine.kernels.gpu.attention.kv_codes import codes_of, scales_of
from baton.engine.kernels.gpu.attention.launch import check_cache, check_table, scale_pairs

_ROWS = 32


@triton.jit(do_not_specialize=["rows"])
def _prompt_qkv(
    qkv,
    cache,
    kv_scales,
    tables,
    row_sequence,
    row_position,
    cos_rows,
    sin_rows,
    query_norm,
    key_norm,
    rows,
    table_stride,
    layer_offset,
    block_stride,
    plane_stride,
    scale_layer_offset,
    scale_block_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_POWER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
):
    half: tl.constexpr = DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    head = tl.program_id(0)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, HALF_POWER)
    there = r < rows
    mask = there[:, None] & (j < half)[None, :]
    # A thread loads and stores the same pair, so no other thread stores what it loads.
    low = qkv + r.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + j[None, :]
    a = tl.load(low, mask=mask, other=0.0)
    b = tl.load(low + half, mask=mask, other=0.0)
    if head < HEADS + KV_HEADS:
        x, y = a.to(tl.float32), b.to(tl.float32)
        if QK_NORM:
            gains = query_norm if head < HEADS else key_norm
            low_gain = tl.load(gains + j, mask=j < half, other=0.0).to(tl.float32)[None, :]
            high_gain = tl.load(gains + half + j, mask=j < half, other=0.0).to(tl.float32)[None, :]
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / DIM + eps)[:, None]
            x, y = x * scale, y * scale
            if query_norm.dtype.element_ty == dtype:
                x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
            x = (x * low_gain).to(dtype).to(tl.float32)
            y = (y * high_gain).to(dtype).to(tl.float32)
        turn = r[:, None] * half + j[None, :]
        cos = tl.load(cos_rows + turn, mask=mask, other=0.0)
        sin = tl.load(sin_rows + turn, mask=mask, other=0.0)
        a, b = (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)
        together()
        tl.store(low, a, mask=mask)
        tl.store(low + half, b, mask=mask)
    if head >= HEADS:
        plane = (head - HEADS) // KV_HEADS
        position = tl.load(row_position + r, mask=there, other=0)
        sequence = tl.load(row_sequence + r, mask=there, other=0).to(tl.int64)
        block = tl.load(tables + sequence * table_stride + position // BLOCK_TOKENS, mask=there, other=0)
        kv_head, token = (head - HEADS) % KV_HEADS, position % BLOCK_TOKENS
        place = block.to(tl.int64) * block_stride + token * DIM
        place += layer_offset + plane * plane_stride + kv_head * (BLOCK_TOKENS * DIM)
        places = cache + place[:, None] + j[None, :]
        if CODES:
            x, y = a.to(tl.float32), b.to(tl.float32)
            scales = scales_of(tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1)))
            x_codes, x = codes_of(x, scales)
            y_codes, y = codes_of(y, scales)
            together()
            tl.store(low, (x * scales[:, None]).to(dtype), mask=mask)
            tl.store(low + half, (y * scales[:, None]).to(dtype), mask=mask)
            tl.store(places, x_codes, mask=mask)
            tl.store(places + half, y_codes, mask=mask)
            pair = (
                block.to(tl.int64) * scale_block_stride + scale_layer_offset + kv_head * BLOCK_TOKENS + token
            )
            tl.store(kv_scales + 2 * pair + plane, scales.to(tl.bfloat16), mask=there)
        else:
            tl.store(places, a, mask=mask)
            tl.store(places + half, b, mask=mask)


def prompt_qkv(
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    tables: Tensor,
    row_sequence: Tensor,
    row_position: Tensor,
    rotary: tuple[Tensor, Tensor],
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Finishes the qkv product of prompt rows: qkv [N, (heads + 2 kv heads) · dim]: q and k normed and
    rotated in place, k and v written to `cache`.

    `cache`: the cache group's tensor, of qkv's dtype, or of codes with their scales `kv_scales`: then k and v
    in qkv become what their codes stand for. `layer` counts within the group. `tables` [B, W] int32;
    `row_sequence`, `row_position` [N] int32: a row's line of `tables`, and its position there. `rotary`: cos,
    sin [N, dim / 2] float32; `norms`: weights [dim] of query and key norm. Raises ValueError for shapes that
    do not fit.
    """
    rows, half = qkv.shape[0], heads.dim // 2
    if qkv.shape[1] != (heads.heads + 2 * heads.kv_heads) * heads.dim or not qkv.is_contiguous():
        raise ValueError(f"qkv is {tuple(qkv.shape)}, or its rows do not follow one another")
    for name, line in (("row_sequence", row_sequence), ("row_position", row_position)):
        if line.shape[0] < rows or line.stride(0) != 1:
            raise ValueError(f"{name} is {tuple(line.shape)}, qkv has {rows} rows")
    if any(tuple(table.shape) != (rows, half) or not table.is_contiguous() for table in rotary):
        raise ValueError(f"the rotary tables are {tuple(rotary[0].shape)}, expected {(rows, half)}")
    check_cache(cache, kv_scales, qkv, heads)
    check_table(tables)
    _, *strides = scale_pairs(cache, kv_scales, layer)
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    _prompt_qkv[(heads.heads + 2 * heads.kv_heads, triton.cdiv(rows, _ROWS))](
        qkv,
        cache,
        cache if kv_scales is None else kv_scales,
        tables,
        row_sequence,
        row_position,
        *rotary,
        query_norm,
        key_norm,
        rows,
        tables.stride(0),
        layer * cache.stride(1),
        cache.stride(0),
        cache.stride(2),
        *strides,
        heads.norm_eps,
        HEADS=heads.heads,
        KV_HEADS=heads.kv_heads,
        DIM=heads.dim,
        HALF_POWER=triton.next_power_of_2(half),
        BLOCK_TOKENS=cache.shape[4],
        QK_NORM=norms is not None,
        ROWS=_ROWS,
        CODES=kv_scales is not None,
        num_warps=4,
    )
