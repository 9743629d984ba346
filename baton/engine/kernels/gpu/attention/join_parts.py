"""Joins the parts of attention whose keys several programs shared, all rows of a pass at once.

    out = sum of out_p · e^lse_p / sum of e^lse_p,   lse = ln(sum of e^lse_p)      over all parts p

`absorb_attention` does so for one part that the library yields in a layout of its own; here all parts stand
among the rows, and are rounded once. Which rows have parts is read from the device, so that a graph of it
holds for any.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fields of a row, int32 each: the row of its first part, how many rows further the next one is,
# and how many there are.
JOIN_FIRST = tl.constexpr(0)
JOIN_STEP = tl.constexpr(1)
JOIN_COUNT = tl.constexpr(2)
JOIN_WIDTH = tl.constexpr(4)


@triton.jit(do_not_specialize=["lse_stride"])
def _join_parts(
    out,
    lse,
    joins,
    lse_stride,
    HEADS: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(joins + row * JOIN_WIDTH + JOIN_COUNT)
    if count > 0:
        first = tl.load(joins + row * JOIN_WIDTH + JOIN_FIRST)
        step = tl.load(joins + row * JOIN_WIDTH + JOIN_STEP)
        h = tl.arange(0, HEADS_POWER)
        d = tl.arange(0, DIM_PADDED)
        in_heads = h < HEADS
        mask = in_heads[:, None] & (d < DIM)[None, :]
        sums = lse + h * lse_stride
        mine = tl.load(sums + row, mask=in_heads, other=0.0)
        highest = mine
        for part in range(count):
            highest = tl.maximum(highest, tl.load(sums + first + part * step, mask=in_heads, other=0.0))
        cell = out + h[:, None] * DIM + d[None, :]
        total = tl.exp(mine - highest)
        place = cell + row.to(tl.int64) * (HEADS * DIM)
        joined = tl.load(place, mask=mask, other=0.0).to(tl.float32) * total[:, None]
        for part in range(count):
            at = first + part * step
            weight = tl.exp(tl.load(sums + at, mask=in_heads, other=0.0) - highest)
            total += weight
            found = tl.load(cell + at.to(tl.int64) * (HEADS * DIM), mask=mask, other=0.0)
            joined += found.to(tl.float32) * weight[:, None]
        tl.store(place, (joined / total[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(sums + row, highest + tl.log(total), mask=in_heads)


def join_parts(out: Tensor, lse: Tensor, joins: Tensor, dim: int) -> None:
    """Joins attention's parts: Rows of out [N, heads · dim] and lse [heads, N], in place, each with its
    parts, which are rows of the same N. Logarithms are natural and float32.

    `joins` [R, JOIN_WIDTH] int32, contiguous, for the first R rows: those whose count is 0 stay as they are.
    Raises ValueError for shapes that do not fit.
    """
    heads = lse.shape[0]
    if out.shape[1] != heads * dim or not out.is_contiguous() or lse.dtype != torch.float32:
        raise ValueError(f"out {tuple(out.shape)} and lse {tuple(lse.shape)} {lse.dtype} do not fit")
    if lse.stride(1) != 1 or joins.shape[0] > min(out.shape[0], lse.shape[1]):
        raise ValueError(f"{joins.shape[0]} rows are more than out {tuple(out.shape)} and lse have")
    if joins.shape[1] != JOIN_WIDTH.value or joins.dtype != torch.int32 or not joins.is_contiguous():
        raise ValueError(f"joins is {tuple(joins.shape)} {joins.dtype}")
    _join_parts[(joins.shape[0],)](
        out,
        lse,
        joins,
        lse.stride(0),
        HEADS=heads,
        HEADS_POWER=triton.next_power_of_2(heads),
        DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim),
        num_warps=4,
    )
