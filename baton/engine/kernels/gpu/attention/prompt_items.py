"""What prompt attention works on: the list of items, how a GPU cuts it, and the checks launchers share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

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
    """`queries`: rows times heads of a group that a program takes; `tile`: keys of a pass of its loop."""

    queries: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 3

    @classmethod
    def of(cls, heads: Heads, dtype: torch.dtype, rows: int) -> PromptTuning:
        """Measured on an H100 (bf16, heads of 128): as large as registers allow, smaller where few rows would
        leave much of the chip idle."""
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


def item_lines(spans: Iterable[Span], rows: int, window: int | None) -> npt.NDArray[np.int32]:
    """[I, ITEM_WIDTH]: the spans in items of at most `rows` rows, those with the most keys first."""
    lines = []
    for span in spans:
        for first in range(0, span.rows, rows):
            count, position = min(rows, span.rows - first), span.position + first
            begin = span.begin if window is None else max(span.begin, position - window + 1)
            end = min(span.end, position + count)
            into = (span.row if span.into is None else span.into) + first
            lines.append((span.row + first, count, position, begin, end, span.table, into, 0))
    lines.sort(key=lambda line: line[ITEM_BEGIN.value] - line[ITEM_END.value])
    return np.array(lines, dtype=np.int32).reshape(-1, ITEM_WIDTH.value)


def check_cache(cache: Tensor, qkv: Tensor, heads: Heads) -> None:
    """Raises ValueError unless `cache` is a cache group's tensor for these heads, of qkv's dtype."""
    got = tuple(cache.shape[2:4]) + tuple(cache.shape[5:])
    if got != (2, heads.kv_heads, heads.dim) or not cache.is_contiguous():
        raise ValueError(f"the cache is {tuple(cache.shape)}, or not contiguous")
    if qkv.dtype != cache.dtype or qkv.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"qkv is {qkv.dtype}, the cache {cache.dtype}")


def check_table(tables: Tensor) -> None:
    """Raises ValueError unless these are block tables as kernels read them."""
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError("block tables are int32 with contiguous rows")


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `row` to `row + rows` of a pass, of the sequence whose line of the block tables is `table`. The
    first stands at `position`. They attend to keys `begin` to `end`, each to those up to itself. What they
    yield is written to row `into` and those behind it; None: to their own."""

    row: int
    rows: int
    position: int
    begin: int
    end: int
    table: int
    into: int | None = None
