"""What becomes of the qkv product of prompt rows: q and k are normed (some families) and rotated where they
are, and k and v go into the paged cache.

One node: a program does some rows of one head. Keys stay in the product too, since attention that needs no
cached token reads them there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import together
from baton.engine.kernels.gpu.attention.items import Heads, check_cache, check_table

_ROWS = 32


@triton.jit(do_not_specialize=["rows"])
def _prompt_qkv(
    qkv,
    cache,
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
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_POWER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROWS: tl.constexpr,
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
        place = block.to(tl.int64) * block_stride + position % BLOCK_TOKENS * DIM
        place += layer_offset + plane * plane_stride + (head - HEADS) % KV_HEADS * (BLOCK_TOKENS * DIM)
        tl.store(cache + place[:, None] + j[None, :], a, mask=mask)
        tl.store(cache + place[:, None] + half + j[None, :], b, mask=mask)


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
) -> None:
    """qkv [N, (heads + 2 kv heads) · dim]: q and k normed and rotated in place, k and v written to `cache`.

    `cache`: the cache group's tensor, of qkv's dtype; `layer` counts within the group. `tables` [B, W] int32;
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
    check_cache(cache, qkv, heads)
    check_table(tables)
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    _prompt_qkv[(heads.heads + 2 * heads.kv_heads, triton.cdiv(rows, _ROWS))](
        qkv,
        cache,
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
        heads.norm_eps,
        HEADS=heads.heads,
        KV_HEADS=heads.kv_heads,
        DIM=heads.dim,
        HALF_POWER=triton.next_power_of_2(half),
        BLOCK_TOKENS=cache.shape[4],
        QK_NORM=norms is not None,
        ROWS=_ROWS,
        num_warps=4,
    )
