"""Joins the parts of attention whose keys several programs shared, rows of one span at once.

    out = sum of out_p · e^lse_p / sum of e^lse_p,   lse = ln(sum of e^lse_p)      over all parts p

`absorb_attention` does so for one part that the library yields in a layout of its own; here all parts stand
among the rows, and are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["row", "first", "count", "rows", "lse_stride"])
def _join_parts(
    out,
    lse,
    row,
    first,
    count,
    rows,
    lse_stride,
    HEADS: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS_POWER)
    d = tl.arange(0, DIM_PADDED)
    in_heads = h < HEADS
    mask = in_heads[:, None] & (d < DIM)[None, :]
    sums = lse + h * lse_stride + r
    mine = tl.load(sums + row, mask=in_heads, other=0.0)
    highest = mine
    for part in range(count):
        highest = tl.maximum(highest, tl.load(sums + first + part * rows, mask=in_heads, other=0.0))
    cell = out + r * (HEADS * DIM) + h[:, None] * DIM + d[None, :]
    total = tl.exp(mine - highest)
    place = cell + row.to(tl.int64) * (HEADS * DIM)
    joined = tl.load(place, mask=mask, other=0.0).to(tl.float32) * total[:, None]
    for part in range(count):
        at = first + part * rows
        weight = tl.exp(tl.load(sums + at, mask=in_heads, other=0.0) - highest)
        total += weight
        found = tl.load(cell + at.to(tl.int64) * (HEADS * DIM), mask=mask, other=0.0)
        joined += found.to(tl.float32) * weight[:, None]
    tl.store(place, (joined / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(sums + row, highest + tl.log(total), mask=in_heads)


def join_parts(out: Tensor, lse: Tensor, row: int, rows: int, first: int, count: int, dim: int) -> None:
    """Rows `row` to `row + rows` of out [N, heads · dim] and lse [heads, N], in place, with the `count` parts
    that stand from row `first` on, one behind another. Logarithms are natural and float32. Raises ValueError
    for shapes that do not fit."""
    heads = lse.shape[0]
    if out.shape[1] != heads * dim or not out.is_contiguous() or lse.dtype != torch.float32:
        raise ValueError(f"out {tuple(out.shape)} and lse {tuple(lse.shape)} {lse.dtype} do not fit")
    if first < row + rows or first + count * rows > min(out.shape[0], lse.shape[1]) or lse.stride(1) != 1:
        raise ValueError(f"{count} parts of {rows} rows from {first} on do not fit {tuple(out.shape)}")
    _join_parts[(rows,)](
        out,
        lse,
        row,
        first,
        count,
        rows,
        lse.stride(0),
        HEADS=heads,
        HEADS_POWER=triton.next_power_of_2(heads),
        DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim),
        num_warps=4,
    )
