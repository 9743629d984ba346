"""Keys and values of a run of cached tokens, from their blocks into one run of memory; codes are restored."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.attention.kv_codes import unpacked
from baton.engine.kernels.gpu.attention.launch import check_table, scale_pairs

_TOKENS = 64


@triton.jit(do_not_specialize=["first", "count"])
def _gather_prefix(
    cache,
    scale_pairs,
    table,
    out,
    first,
    count,
    layer_offset,
    block_stride,
    plane_stride,
    scale_layer_offset,
    scale_block_stride,
    out_plane_stride,
    out_head_stride,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    CODES: tl.constexpr,
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
    if CODES:
        place = scale_layer_offset + head * BLOCK_TOKENS + token % BLOCK_TOKENS
        pairs = tl.load(scale_pairs + block * scale_block_stride + place, mask=there, other=0)
        k_scales, v_scales = unpacked(pairs)
        scales = tl.where(plane == 0, k_scales, v_scales)
        values = (values.to(tl.float32) * scales[:, None]).to(out.dtype.element_ty)
    target = plane * out_plane_stride + head * out_head_stride + t.to(tl.int64) * DIM
    tl.store(out + target[:, None] + d[None, :], values, mask=mask)


def gather_prefix(
    out: Tensor,
    cache: Tensor,
    layer: int,
    table: Tensor,
    first: int,
    count: int,
    kv_scales: Tensor | None = None,
) -> None:
    """Gathers keys and values from their blocks: Tokens first to first + count of one sequence → out[:, :,
    :count], of [planes, kv heads, T, dim].

    `cache`, `kv_scales`: the cache group's tensor and scales; codes are restored in out's dtype. `layer`
    counts within the group; `table` [W] int32, the sequence's blocks. Raises ValueError for shapes that do
    not fit.
    """
    _, _, planes, heads, block_tokens, dim = cache.shape
    if out.shape[:2] != (planes, heads) or out.shape[2] < count or out.shape[3] != dim:
        raise ValueError(f"out is {tuple(out.shape)}, the cache {tuple(cache.shape)}, for {count} tokens")
    if out.stride(3) != 1 or out.stride(2) != dim or not cache[0, 0].is_contiguous():
        raise ValueError("out's and the cache's tokens must follow one another")
    if (kv_scales is None) != (out.dtype == cache.dtype):
        raise ValueError(f"out is {out.dtype}, the cache {cache.dtype}")
    if (first + count - 1) // block_tokens >= table.shape[0]:
        raise ValueError(f"{table.shape[0]} blocks do not hold token {first + count - 1}")
    check_table(table[None])
    pairs, *strides = scale_pairs(cache, kv_scales, layer)
    _gather_prefix[(triton.cdiv(count, _TOKENS), heads, planes)](
        cache,
        pairs,
        table,
        out,
        first,
        count,
        layer * cache.stride(1),
        cache.stride(0),
        cache.stride(2),
        *strides,
        out.stride(0),
        out.stride(1),
        DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim),
        BLOCK_TOKENS=block_tokens,
        TOKENS=_TOKENS,
        CODES=kv_scales is not None,
        num_warps=4,
    )
