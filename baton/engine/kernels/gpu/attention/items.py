"""The items that decode attention works on, the shape of the heads, and how a GPU cuts both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs a multiprocessor from which on two tiles on their way are better than three, and the dimension
# above which heads are wide (`AttentionTuning.of`).
_MANY_PROGRAMS, _WIDE_HEAD = 2.0, 128
# Programs a multiprocessor that are many where the cache is in fp8.
_MANY_PROGRAMS_OF_CODES = 3.8
# Query heads that are one tile of the matrix units.
_ONE_TILE_GROUP = 16
# Registers of a multiprocessor, and of a thread where four or three programs of four warps share them.
_REGISTERS = 65_536
_FOUR_PROGRAMS_REGISTERS, _THREE_PROGRAMS_REGISTERS = 128, 168
# Of a thread, where a multiprocessor runs one program of eight warps.
_ONE_PROGRAM_REGISTERS = 255
# Rows, and slots of several rows, are very few where this many times as many would still leave
# multiprocessors without a program.
_VERY_FEW_ROWS, _VERY_FEW_SLOTS = 4, 8
# Programs a multiprocessor of few rows whose cache is in fp8.
_FEW_ROWS_PROGRAMS = 3
# Queries that an item may have, by how many rows of a slot it takes (`rows_per_item`). Two tiles of the
# matrix units are as many as four warps hold results of beside the tiles of K; for four rows or fewer.
_MOST_QUERIES = {8: _ONE_TILE_GROUP, 4: 2 * _ONE_TILE_GROUP, 2: 2 * _ONE_TILE_GROUP}
# Tokens of which an item is whole tiles, and that a program takes at once unless its tuning has fewer.
TILE = 64
# Tokens on their way, K and V of heads of 128 in bf16, beside which a multiprocessor runs four programs.
_FOUR_PROGRAMS_TOKENS = 96
# Shared memory of a multiprocessor for tiles of K and V: of 227 KiB, without what queries and results take.
_TILES_BYTES = 192 << 10
# Fields of an item, int32 each: one load's width.
ITEM_ROW = tl.constexpr(0)
ITEM_SLOT = tl.constexpr(1)
ITEM_POSITION = tl.constexpr(2)
ITEM_BEGIN = tl.constexpr(3)
ITEM_END = tl.constexpr(4)
ITEM_FIRST = tl.constexpr(5)
ITEM_PARTS = tl.constexpr(6)
ITEM_ROWS = tl.constexpr(7)
ITEM_WIDTH = tl.constexpr(8)
ITEM_DEPTH = tl.constexpr(256)


class Items:
    """The list of one cache group, and the place where its rows' partial results meet.

    `count` [1]: items that there are. `items` [I, ITEM_WIDTH]: item i is tokens begin:end of a row, begin a
    multiple of TILE; the row's slot and position; its items are first : first + parts. Where an item is of up
    to `rows_per_item` rows of a slot, which lie side by side, row and position are the first one's, and the
    last field says how many there are, plus ITEM_DEPTH times how many rows the slot has before these. All
    int32.
    `sums` [I, rows_per_item · heads, dim] and `scales` [I, rows_per_item · heads, 2] float32; `arrived` [R,
    kv heads] int32 of zeros, which every layer leaves as zeros.
    """

    def __init__(
        self,
        rows: int,
        most: int,
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device,
        rows_per_item: int = 1,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.rows_per_item = rows_per_item
        self.count = ints(1)
        self.items = ints(most, ITEM_WIDTH.value)
        self.sums = torch.empty(most, rows_per_item * heads, dim, dtype=torch.float32, device=device)
        self.scales = torch.empty(most, rows_per_item * heads, 2, dtype=torch.float32, device=device)
        self.arrived = ints(rows, kv_heads)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention, as its kernel needs it. `window`: tokens a row sees, or None."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    norm_eps: float
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def log2_scale(self) -> float:
        """Factor by which scores become exponents of 2."""
        return self.scale * 1.4426950408889634

    @property
    def seen(self) -> int:
        """Tokens that a row sees: its window, or more than there can be."""
        return self.window or 1 << 30


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """The attention kernel's cut for a GPU. `registers`: of a thread, at most; None: as many as its code
    likes. `tile`: tokens that a program takes at once, TILE or a half or a quarter of it."""

    warps: int = 4
    stages: int = 3
    registers: int | None = None
    tile: int = TILE

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor runs at once: two tiles of 64 tokens of K and V on their way leave
        room for three, registers for four, where they are not more (heads of 128 in bf16, and in fp8;
        Hopper)."""
        fit = 4 if self.registers is None else _REGISTERS // (32 * self.warps * self.registers)
        return min(3 if (self.stages - 1) * self.tile > _FOUR_PROGRAMS_TOKENS else 4, fit)

    def stages_of(self, token_bytes: int) -> int:
        """`stages`, or as many as the tiles of K and V on their way have shared memory for, with
        `token_bytes` of a token's K: heads of 256 in float32 have room for two."""
        return min(self.stages, 1 + _TILES_BYTES // (2 * self.tile * token_bytes))

    @classmethod
    def of(cls, heads: Heads, rows: int, multiprocessors: int, quantised: bool = False) -> AttentionTuning:
        """Tuning for one row a slot. Three tiles of K and V on their way; two where there are many programs,
        whose registers leave room for more of them on a multiprocessor. With a bound of registers the
        compiler orders a program's loads better, also where it would not use more (8 rows of 8,256 tokens,
        32 and 8 heads: 69.4 and 78.3 us). Wide heads need their registers, and take half tiles (8 and 4 heads
        of 256: 32 x 1,120 40.5 us, with whole tiles 47.2; a single row 10.3 and 9.9). By measurements on an
        H200 of seven shapes of heads, 1 to 256 rows, and contexts of 1K to 32K.

        `quantised`: the cache is in fp8. Few rows, of which `SplitPolicy.filling` makes many programs, take
        two warps (4 x 8,256 tokens, 32 and 8 heads: 28.2 us, with four warps 30.7), very few rows four (1 and
        4 x 1,120 7.7 and 10.8, with two 10.0 and 11.9). Many programs take so few registers that four of them
        fit a multiprocessor, with two tiles (an H100, 64 and 128 rows of 1,120 tokens: 58.9 and 112.5 us;
        with two warps 60.3 and 116.5); heads that need more registers take two warps.
        """
        wide, narrow = heads.dim > _WIDE_HEAD, cls(registers=_FOUR_PROGRAMS_REGISTERS)
        very_few = few_rows(_VERY_FEW_ROWS * rows, heads.kv_heads, multiprocessors)
        if quantised and few_rows(rows, heads.kv_heads, multiprocessors):
            if wide:
                return cls(warps=4 if very_few else 2, tile=TILE // 2)
            return narrow if very_few else cls(warps=2)
        least = _MANY_PROGRAMS_OF_CODES if quantised else _MANY_PROGRAMS
        many = rows * heads.kv_heads >= least * multiprocessors
        if quantised and many:
            if not wide and heads.group <= _ONE_TILE_GROUP:
                return replace(narrow, stages=2)
            return cls(warps=2, stages=2)
        if quantised:
            return cls()
        if wide:
            return cls(tile=TILE // 2 if rows > 1 else TILE)
        return replace(narrow, stages=2) if many and heads.group > 1 and heads.dim == _WIDE_HEAD else narrow

    @classmethod
    def of_slots(
        cls, heads: Heads, slots: int, rows_per_item: int, multiprocessors: int, quantised: bool = False
    ) -> AttentionTuning:
        """Tuning for several rows a slot: three tiles of K and V on their way; where there are many programs
        two, and registers for four programs of a multiprocessor. By measurements on an H200 (8 KV heads of
        128, 1,152 tokens, with three tiles and with two; 8, 32, 64 and 128 slots: 16 queries 17.5 and 22.2,
        41.3 and 44.4, 81.7 and 76.2, 149.7 and 147.6 us; 32 queries 20.7 and 29, 42.7 and 55, 95 and 81.4,
        160 and 157).

        A cache of codes: registers for as many programs as there are for a multiprocessor, one of eight warps
        where that is one (four rows of 1, 8, 32 and 64 slots: 10.1, 16.5, 33.3 and 57.5 us; with registers
        for four programs and two tiles 11.8, 18.0, 43.0 and 57.5). Wide heads take twice the warps for 32
        queries and for codes, of which four warps would spill, by what the compiler reports (Triton 3.6,
        Hopper), not by measurements.
        """
        one_tile = rows_per_item * heads.group <= _ONE_TILE_GROUP
        if heads.dim > _WIDE_HEAD and (quantised or not one_tile):
            return cls(warps=8, stages=2, registers=_FOUR_PROGRAMS_REGISTERS if one_tile else None)
        programs = slots * heads.kv_heads / multiprocessors
        if quantised:
            if few_rows(_VERY_FEW_SLOTS * slots, heads.kv_heads, multiprocessors):
                return cls(warps=8, registers=_ONE_PROGRAM_REGISTERS)
            if 1 < programs <= _MANY_PROGRAMS:
                return cls()
            if programs <= _FEW_ROWS_PROGRAMS:
                return cls(registers=_THREE_PROGRAMS_REGISTERS)
            return cls(stages=2, registers=_FOUR_PROGRAMS_REGISTERS)
        if programs < _MANY_PROGRAMS:
            return cls()
        return cls(stages=2, registers=_FOUR_PROGRAMS_REGISTERS if heads.dim <= _WIDE_HEAD else None)


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """The rule by which a step's attention is cut into items.

    A row's context, from its window's first tile to its own token, is cut into equal parts of whole tiles.
    Mode `fast` chooses the parts' length so that all rows together make about `wanted` items a KV head, and
    no part is shorter than `shortest`: a chip is filled by one long row as by many short ones. A GPU runs
    `wave` items of a KV head at once: of more rows, those past the last whole wave are cut so that they fill
    another, since few programs alone read memory slowly. Mode `exact` uses parts of `fixed` tokens, so that a
    row's cuts depend on its own length alone. `shortest` and `fixed` are multiples of TILE.
    """

    wanted: int = 12
    shortest: int = 128
    fixed: int | None = None
    wave: int = 1 << 16

    @classmethod
    def filling(
        cls, multiprocessors: int, kv_heads: int, rows: int, resident: int, quantised: bool = False
    ) -> SplitPolicy:
        """The policy of mode `fast` for steps of up to `rows` rows: as many items as give each multiprocessor
        one program, or `_FEW_ROWS_PROGRAMS` where few rows are read from a cache in fp8 (`quantised`). By
        measurements on an H100, 8 KV heads: 8 rows of 32,768 tokens take 196 us in place of 298, of 1,120
        tokens 15.3 in place of 17.1; 32 rows of 1,120 would take 36.8 in place of 34.7. `resident`: programs
        that a multiprocessor runs at once.
        """
        few = quantised and few_rows(rows, kv_heads, multiprocessors)
        programs = min(_FEW_ROWS_PROGRAMS, resident) if few else 1
        return cls(
            wanted=max(1, programs * multiprocessors // kv_heads),
            wave=max(1, resident * multiprocessors // kv_heads),
        )

    def most_items(self, rows: int, pool_tokens: int) -> int:
        """A bound of the items of `rows` rows whose blocks hold `pool_tokens` tokens in all."""
        if self.fixed is not None:
            return rows + pool_tokens // self.fixed + 1
        return rows + self.wanted + (self.wave if rows > self.wave else 0)


def rows_per_item(heads: Heads, rows_per_slot: int) -> int:
    """Rows of a slot that one item takes at most, 8, 4 or 2: no more than a slot may have, rounded up. A slot
    that has more has several items, which read its keys and values each: from the cache, where they run side
    by side. Two tiles for eight rows would be slower for slots with fewer: on an H200, 8 KV heads with 4
    queries each and 1,152 tokens, 8, 64 and 128 slots of four rows take 17.5, 75.2 and 144.8 us in one tile,
    19.9, 79.8 and 153 in two; 1, 8 and 32 slots of eight rows 10.1, 26.5 and 50.8 in two items of one tile,
    12.2, 20.7 and 42.7 in one of two.
    """
    wide = heads.dim > _WIDE_HEAD
    fits = [n for n, most in _MOST_QUERIES.items() if n * heads.group <= most and not (wide and n == 8)]
    return min([n for n in fits if n >= rows_per_slot], default=max(fits, default=2))


def few_rows(rows: int, kv_heads: int, multiprocessors: int) -> bool:
    """True if rows that are not cut leave multiprocessors without a program."""
    return rows * kv_heads <= multiprocessors


@triton.jit
def load_item(line):
    """Loads an item from its `line` of the list → row, slot, position, begin and end of its tokens, the first
    item of its row, and how many its row has."""
    row = tl.load(line + ITEM_ROW)
    slot = tl.load(line + ITEM_SLOT)
    position = tl.load(line + ITEM_POSITION)
    begin = tl.load(line + ITEM_BEGIN)
    end = tl.load(line + ITEM_END)
    first = tl.load(line + ITEM_FIRST)
    parts = tl.load(line + ITEM_PARTS)
    return row, slot, position, begin, end, first, parts


@triton.jit
def item_span(position, window, TILE: tl.constexpr):
    """First token and number of tokens of a row's items (`SplitPolicy`)."""
    start = tl.maximum(position - window + 1, 0) // TILE * TILE
    return start, position + 1 - start
