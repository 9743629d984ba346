"""Entries (a row and one of its experts) gathered into tiles of one expert each.

    entries  row 0: 3 1   row 1: 1 2   row 2: 1 -      entry = row · k + place
    tiles    expert 1: entries 1 2 4    expert 2: 3    expert 3: 0

A program places the entries of a run of rows, behind those of the runs before it, which it knows by their
counts. No atomics: within an expert entries stand in the order of the rows, so a step's bits are the same
each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import dependent_launch, wait_for_previous
from baton.engine.kernels.expert_tiles import FEW_ROWS, most_tiles

# Tiles or entries that a program takes at once, and runs.
_MOST_BLOCK, _LEAST_BLOCK, _RUNS = 64, 16, 16


@triton.jit(do_not_specialize=["rows", "runs", "tile_count"])
def _align(
    ids, counts, tile_expert, tile_entry, expert_ends, entry_place, rows, runs, tile_count,
    EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr, TOP_K: tl.constexpr,
    TILE: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_previous()
    mine = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_POWER)
    lane = tl.arange(0, BLOCK)
    totals = tl.zeros((EXPERTS_POWER,), tl.int32)
    taken = tl.zeros((EXPERTS_POWER,), tl.int32)
    for start in range(0, runs, RUNS):
        run = (start + tl.arange(0, RUNS))[:, None]
        mask = (run < runs) & (expert < EXPERTS)[None, :]
        found = tl.load(counts + run * EXPERTS + expert[None, :], mask=mask, other=0)
        totals += tl.sum(found, 0)
        taken += tl.sum(tl.where(run < mine, found, 0), 0)
    tiles = (totals + (TILE - 1)) // TILE
    ends = tl.cumsum(tiles, 0)
    firsts = ends - tiles
    if PLACES:
        tl.store(expert_ends + expert, ends * TILE, mask=(expert < EXPERTS) & (mine + expert * 0 == 0))
    # Each tile's expert, and -1 in its places without an entry; the others are written below. Programs take
    # turns.
    for start in range(mine * BLOCK, tile_count, runs * BLOCK):
        tile = start + lane
        number = tl.sum((tile[:, None] >= ends[None, :]).to(tl.int32), 1)
        owner = number[:, None] == expert[None, :]
        rest = tl.sum(tl.where(owner, totals[None, :], 0), 1)
        rest -= (tile - tl.sum(tl.where(owner, firsts[None, :], 0), 1)) * TILE
        tl.store(tile_expert + tile, tl.where(rest > 0, number, -1), mask=tile < tile_count)
        place = tl.arange(0, TILE)
        free = (place[None, :] >= rest[:, None]) & (tile < tile_count)[:, None]
        tl.store(tile_entry + tile[:, None] * TILE + place[None, :], -1, mask=free)
    end = tl.minimum((mine + 1) * RUN, rows) * TOP_K
    for start in range(mine * RUN * TOP_K, end, BLOCK):
        entry = start + lane
        found = tl.load(ids + entry, mask=entry < end, other=-1)
        own = (found[:, None] == expert[None, :]).to(tl.int32)
        before = tl.cumsum(own, 0) - own + taken[None, :] + (firsts * TILE)[None, :]
        place = tl.sum(own * before, 1)
        tl.store(tile_entry + place, entry, mask=found >= 0)
        if PLACES:
            tl.store(entry_place + entry, place, mask=found >= 0)
        taken += tl.sum(own, 0)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows by expert, in tiles. `expert` [T] int32: of each tile, -1 beyond the last one. `entry` [T, rows of
    a tile] int32: row · k + place of each row of a tile, -1 for none."""

    expert: Tensor
    entry: Tensor

    @classmethod
    def empty(
        cls, rows: int, top_k: int, experts: int, device: torch.device | str, tile_rows: int = FEW_ROWS
    ) -> Tiles:
        """Memory for the tiles of up to `rows` rows, however they are routed. `tile_rows`: a power of two, 16
        at least."""
        count = most_tiles(rows, top_k, experts, tile_rows)
        expert = torch.empty(count, dtype=torch.int32, device=device)
        return cls(expert, torch.empty(count, tile_rows, dtype=torch.int32, device=device))

    @property
    def tile_rows(self) -> int:
        return self.entry.shape[1]

    def of_rows(self, rows: int, top_k: int, experts: int) -> Tiles:
        """The first tiles, as many as `rows` rows can need."""
        count = most_tiles(rows, top_k, experts, self.tile_rows)
        return Tiles(self.expert[:count], self.entry[:count])


@dataclass(frozen=True, slots=True)
class EntryPlaces:
    """The places of entries in tiles of several, counted through all tiles: `ends` [E] int32, behind
    the last tile of each expert; `place` [R · k] int32 of each entry, whose expert is not -1."""

    ends: Tensor
    place: Tensor

    @classmethod
    def empty(cls, rows: int, top_k: int, experts: int, device: torch.device | str) -> EntryPlaces:
        """Memory for up to `rows` rows."""
        return cls(*(torch.empty(n, dtype=torch.int32, device=device) for n in (experts, rows * top_k)))


def align_rows(
    tiles: Tiles,
    ids: Tensor,
    counts: Tensor,
    run: int,
    places: EntryPlaces | None = None,
    *,
    early: bool = False,
) -> None:
    """ids [R, k] int32, -1 for none → the tiles of all entries, and their `places`. `counts` [⌈R / run⌉, E]
    int32: entries of each expert among each `run` rows. `early`: see `dependent_launch`. Raises ValueError
    for too few tiles or counts."""
    (rows, top_k), experts = ids.shape, counts.shape[1]
    count, runs = len(tiles.expert), triton.cdiv(rows, run)
    if count < most_tiles(rows, top_k, experts, tiles.tile_rows) or len(counts) < runs:
        raise ValueError(
            f"{count} tiles and {len(counts)} counts are too few for {rows} rows of {top_k} among {experts} "
            f"experts"
        )
    block = min(max(triton.next_power_of_2(run * top_k), _LEAST_BLOCK), _MOST_BLOCK)
    _align[(runs,)](
        ids,
        counts,
        tiles.expert,
        tiles.entry,
        ids if places is None else places.ends,
        ids if places is None else places.place,
        rows,
        runs,
        count,
        EXPERTS=experts,
        EXPERTS_POWER=triton.next_power_of_2(experts),
        TOP_K=top_k,
        TILE=tiles.tile_rows,
        RUN=run,
        RUNS=_RUNS,
        BLOCK=block,
        PLACES=places is not None,
        EARLY=early,
        num_warps=8 if block == _MOST_BLOCK else 4,
        **dependent_launch(early),
    )
