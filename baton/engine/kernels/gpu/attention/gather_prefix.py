"""Keys and values of a run of cached tokens, from their blocks into one run of memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.attention.items import check_table

_TOKENS = 64


@triton.jit(do_not_specialize=["first", "count"])
def _gather_prefix(
    cache,
    table,
    out,
    first,
    count,
    layer_offset,
    block_stride,
    plane_stride,
    out_plane_stride,
    out_head_stride,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, plane = tl.program_id(1), tl.program_id(2)
    there = t < count
    d = tl.arange(0, DIM_PADDED)
    mask = there[:, None] & (d < DIM)[None, :]
    token = first + t
    block = tl.load(table + token // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
    source = block * block_stride + token % BLOCK_TOKENS * DIM
    source += layer_offset + plane * plane_stride + head * (BLOCK_TOKENS * DIM)
    values = tl.load(cache + source[:, None] + d[None, :], mask=mask)
    target = plane * out_plane_stride + head * out_head_stride + t.to(tl.int64) * DIM
    tl.store(out + target[:, None] + d[None, :], values, mask=mask)


def gather_prefix(out: Tensor, cache: Tensor, layer: int, table: Tensor, first: int, count: int) -> None:
    """Tokens first to first + count of one sequence → out[:, :, :count], of [planes, kv heads, T, dim].

    `cache`: the cache group's tensor; `layer` counts within the group; `table` [W] int32, the sequence's
    blocks. Raises ValueError for shapes that do not fit.
    """
    _, _, planes, heads, block_tokens, dim = cache.shape
    if out.shape[:2] != (planes, heads) or out.shape[2] < count or out.shape[3] != dim:
        raise ValueError(f"out is {tuple(out.shape)}, the cache {tuple(cache.shape)}, for {count} tokens")
    if out.stride(3) != 1 or out.stride(2) != dim or out.dtype != cache.dtype or not cache.is_contiguous():
        raise ValueError("out's tokens must follow one another, in the cache's dtype")
    if (first + count - 1) // block_tokens >= table.shape[0]:
        raise ValueError(f"{table.shape[0]} blocks do not hold token {first + count - 1}")
    check_table(table[None])
    _gather_prefix[(triton.cdiv(count, _TOKENS), heads, planes)](
        cache,
        table,
        out,
        first,
        count,
        layer * cache.stride(1),
        cache.stride(0),
        cache.stride(2),
        out.stride(0),
        out.stride(1),
        DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim),
        BLOCK_TOKENS=block_tokens,
        TOKENS=_TOKENS,
        num_warps=4,
    )
