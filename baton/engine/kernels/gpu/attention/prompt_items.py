"""The items that prompt attention works on, how a GPU cuts it, and the checks launchers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from baton.engine.kernels.gpu.attention.items import Heads

# Fields of an item, int32 each.
ITEM_ROW = tl.constexpr(0)
ITEM_ROWS = tl.constexpr(1)
ITEM_POSITION = tl.constexpr(2)
ITEM_BEGIN = tl.constexpr(3)
ITEM_END = tl.constexpr(4)
ITEM_TABLE = tl.constexpr(5)
ITEM_INTO = tl.constexpr(6)
ITEM_WIDTH = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class PromptTuning:
    """Tiles of prompt attention. `queries`: rows times heads of a group that a program takes; `tile`: keys of
    a pass of its loop."""

    queries: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 3

    @classmethod
    def of(cls, heads: Heads, dtype: torch.dtype, rows: int) -> PromptTuning:
        """Tuning for `rows` rows, as measured on an H100 (bf16, heads of 128): as large as registers allow,
        smaller where few rows would leave much of the chip idle."""
        if dtype == torch.float32:
            return cls(queries=16, tile=32, warps=4, stages=2)
        if heads.dim > 128:
            return cls(queries=64, tile=32, warps=4, stages=2)
        few = rows * heads.heads < 96 * 128
        return cls(queries=64, warps=4) if few else cls()

    def rows(self, heads: Heads) -> int:
        """Rows of an item, at most."""
        return max(1, self.queries // power_of_two(heads.heads // heads.kv_heads))


def power_of_two(count: int) -> int:
    """The least that is not below."""
    return 1 << (count - 1).bit_length()
