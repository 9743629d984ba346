"""What split attention works on: the list of items, the shape of the heads, and how a GPU cuts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

# Fields of an item, int32 each: one load's width.
ITEM_ROW = tl.constexpr(0)
ITEM_SLOT = tl.constexpr(1)
ITEM_POSITION = tl.constexpr(2)
ITEM_BEGIN = tl.constexpr(3)
ITEM_END = tl.constexpr(4)
ITEM_FIRST = tl.constexpr(5)
ITEM_PARTS = tl.constexpr(6)
ITEM_WIDTH = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class Items:
    """The list of one cache group, and the place where its rows' partial results meet.

    `count` [1]: items that there are. `items` [I, ITEM_WIDTH]: item i is tokens begin:end of a row, begin a
    multiple of TILE; the row's slot and position; its items are first : first + parts. All int32.
    `sums` [I, heads, dim] and `scales` [I, heads, 2] float32; `arrived` [R, kv heads] int32 of zeros, which
    every layer leaves as zeros.
    """

    count: Tensor
    items: Tensor
    sums: Tensor
    scales: Tensor
    arrived: Tensor

    @classmethod
    def empty(cls, rows: int, most: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> Items:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        sums = torch.empty(most, heads, dim, dtype=torch.float32, device=device)
        scales = torch.empty(most, heads, 2, dtype=torch.float32, device=device)
        return cls(ints(1), ints(most, ITEM_WIDTH.value), sums, scales, ints(rows, kv_heads))


@dataclass(frozen=True, slots=True)
class Heads:
    """What the kernel must know of a model's attention. `window`: tokens a row sees, or None."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    norm_eps: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """How the kernel is cut for a GPU."""

    warps: int = 4
    stages: int = 3

    @classmethod
    def for_rows(cls, rows: int) -> AttentionTuning:
        """Measured on an H100: few rows want deep programs, many rows many shallow ones."""
        return cls(stages=3 if rows <= 16 else 2 if rows < 128 else 1)
