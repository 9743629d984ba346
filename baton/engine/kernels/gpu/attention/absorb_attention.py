"""Joins attention over some keys with attention over others, of the same queries.

    out = (out · e^lse + part · e^part_lse) / (e^lse + e^part_lse),   lse = ln(e^lse + e^part_lse)

Exact except for rounding: a softmax over all keys is the average of those over parts of them, weighted by
their sums of exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


# Where a row's sums begin has any alignment, and one kernel for all.
@triton.jit(
    do_not_specialize=["lse_stride", "part_lse_stride"], do_not_specialize_on_alignment=["lse", "part_lse"]
)
def _absorb(
    out,
    lse,
    part,
    part_lse,
    lse_stride,
    part_head_stride,
    part_row_stride,
    part_lse_stride,
    HEADS: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS_POWER)
    d = tl.arange(0, DIM_PADDED)
    in_heads = h < HEADS
    mask = in_heads[:, None] & (d < DIM)[None, :]
    mine = tl.load(lse + h * lse_stride + row, mask=in_heads, other=0.0)
    others = tl.load(part_lse + h * part_lse_stride + row, mask=in_heads, other=0.0)
    highest = tl.maximum(mine, others)
    weight, other_weight = tl.exp(mine - highest), tl.exp(others - highest)
    total = weight + other_weight
    place = out + row * (HEADS * DIM) + h[:, None] * DIM + d[None, :]
    source = part + row * part_row_stride + h[:, None] * part_head_stride + d[None, :]
    kept = tl.load(place, mask=mask, other=0.0).to(tl.float32) * (weight / total)[:, None]
    added = tl.load(source, mask=mask, other=0.0).to(tl.float32) * (other_weight / total)[:, None]
    tl.store(place, (kept + added).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + h * lse_stride + row, highest + tl.log(total), mask=in_heads)


def absorb_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Joins `part` into `out`: out [R, heads · dim] with lse [heads, R], both in place; part [heads, R, dim]
    with part_lse [heads, R].

    Logarithms are natural and float32. Raises ValueError for shapes that do not fit.
    """
    heads, rows, dim = part.shape
    if tuple(out.shape) != (rows, heads * dim) or not out.is_contiguous() or part.stride(2) != 1:
        raise ValueError(f"out {tuple(out.shape)} and part {tuple(part.shape)} do not fit")
    for name, sums in (("lse", lse), ("part_lse", part_lse)):
        if tuple(sums.shape) != (heads, rows) or sums.dtype != torch.float32 or sums.stride(1) != 1:
            raise ValueError(f"{name} is {tuple(sums.shape)} {sums.dtype}, expected {(heads, rows)} float32")
    _absorb[(rows,)](
        out,
        lse,
        part,
        part_lse,
        lse.stride(0),
        part.stride(0),
        part.stride(1),
        part_lse.stride(0),
        HEADS=heads,
        HEADS_POWER=triton.next_power_of_2(heads),
        DIM=dim,
        DIM_PADDED=triton.next_power_of_2(dim),
        num_warps=4,
    )
