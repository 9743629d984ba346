"""The norm before a mixture, and each row's experts.

A program multiplies a tile of rows by a part of the router, on the matrix units. The last of a tile's
programs to arrive has all logits of its rows, and takes their softmax and the best experts. A row's result
depends on the tiles (`RouterTuning`) alone, neither on its place nor on the other rows.

Where all rows are one tile, that program gathers their entries into the tiles of the experts' products too,
in place of `align_rows`: each expert that is taken has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP, dependent_launch, together, wait_for_previous
from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.gpu.experts.align_rows import Tiles


@triton.jit
def _row_tile(hidden, row, there, k, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """[BM, BK] of hidden in float32; zeros in rows that are not there."""
    mask = there[:, None] if EVEN else there[:, None] & (k < WIDTH)[None, :]
    at = hidden + row.to(tl.int64)[:, None] * WIDTH + k[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _gather(
    tile_expert, tile_entry, tile_count, row, there, numbers, takes, EXPERTS_POWER: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_POWER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles of all entries, one for each expert that is taken, as `align_rows` makes them. `numbers`: the
    experts of each row [BM, TOP_K_POWER]; `takes` [BM, EXPERTS_POWER]: 1 where a row takes an expert."""
    expert = tl.arange(0, EXPERTS_POWER)
    taken = (tl.sum(takes, 0) > 0).to(tl.int32)
    tile = tl.cumsum(taken, 0) - taken
    used = tl.sum(taken, 0)
    for start in range(0, tile_count, EXPERTS_POWER):
        number = start + expert
        tl.store(tile_expert + number, -1, mask=(number >= used) & (number < tile_count))
    entries = (tile * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    tl.store(tile_entry + entries, tl.full(entries.shape, -1, tl.int32), mask=(taken > 0)[:, None])
    tl.store(tile_expert + tile, expert, mask=taken > 0)
    together()
    places = tl.cumsum(takes, 0) - takes + (tile * TILE)[None, :]
    place = tl.arange(0, TOP_K_POWER)[None, :]
    for turn in tl.static_range(TOP_K):
        number = tl.max(tl.where(place == turn, numbers, -1), 1)[:, None]
        at = tl.sum(tl.where(expert[None, :] == number, places, 0), 1)
        tl.store(tile_entry + at, row * TOP_K + turn, mask=there)


@triton.jit
def _choose(
    logits, ids, weights, counts, taken_in_all, tile_expert, tile_entry, tile_count, row, there, rows,
    EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POWER: tl.constexpr,
    NORMALISE: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Softmax over a tile's logits, the best of each row, and -1 for rows that are not there. `counts`: of
    the tile, how many of its rows take each expert; they are added to `taken_in_all`. TILE: see `_route`."""
    expert = tl.arange(0, EXPERTS_POWER)[None, :]
    place = tl.arange(0, TOP_K_POWER)[None, :]
    at = logits + row.to(tl.int64)[:, None] * EXPERTS + expert
    known = there[:, None] & (expert < EXPERTS)
    # Past the first-level cache: other multiprocessors have written them.
    found = tl.load(at, mask=known, other=float("-inf"), cache_modifier=".cg")
    found = tl.where(there[:, None], found, 0.0)
    shares = tl.exp(found - tl.max(found, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    # A row that is no number equals no maximum: it would take an expert that there is not.
    shares = tl.where(shares == shares, shares, 0.0)
    shares = tl.where(expert < EXPERTS, shares, -1.0)
    taken = tl.zeros((BM, TOP_K_POWER), tl.float32)
    numbers = tl.full((BM, TOP_K_POWER), -1, tl.int32)
    takes = tl.zeros((BM, EXPERTS_POWER), tl.int32)
    for turn in tl.static_range(TOP_K):
        best = tl.max(shares, 1)[:, None]
        # Of equal shares the lower expert is taken.
        number = tl.min(tl.where(shares == best, expert, EXPERTS_POWER), 1)[:, None]
        taken = tl.where(place == turn, best, taken)
        numbers = tl.where(place == turn, number, numbers)
        shares = tl.where(expert == number, -1.0, shares)
        takes = tl.where(there[:, None] & (expert == number), 1, takes)
    each = tl.arange(0, EXPERTS_POWER)
    count = tl.sum(takes, 0)
    tl.store(counts + each, count, mask=each < EXPERTS)
    tl.atomic_add(taken_in_all + each, count.to(tl.int64), mask=(each < EXPERTS) & (count > 0), sem="relaxed")
    if NORMALISE:
        taken = taken / tl.sum(taken, 1)[:, None]
    at = row.to(tl.int64)[:, None] * TOP_K + place
    stored = (row < rows)[:, None] & (place < TOP_K)
    tl.store(ids + at, tl.where(there[:, None], numbers, -1), mask=stored)
    tl.store(weights + at, taken, mask=stored & there[:, None])
    if TILE > 0:
        _gather(
            tile_expert, tile_entry, tile_count, row, there, numbers, takes, EXPERTS_POWER, TOP_K,
            TOP_K_POWER, TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tile_count"])
def _route(
    hidden, gain, router, present, normed, ids, weights, taken_in_all, logits, counts, arrived, tile_expert,
    tile_entry, tile_count, eps, rows,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_POWER: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_POWER: tl.constexpr, NORMALISE: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TILE: rows of an expert's tile where entries are gathered into such, else 0."""
    if EARLY:
        wait_for_previous()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tile * BM + tl.arange(0, BM)
    there = tl.load(present + row, mask=row < rows, other=-1) >= 0
    stores_norm = there & (part + tl.zeros((BM,), tl.int32) == 0)
    if tl.max(there.to(tl.int32), 0) == 0:
        place = tl.arange(0, TOP_K_POWER)[None, :]
        mask = (row < rows)[:, None] & (place < TOP_K)
        tl.store(ids + row.to(tl.int64)[:, None] * TOP_K + place, -1, mask=mask)
        each = tl.arange(0, EXPERTS_POWER)
        tl.store(counts + tile * EXPERTS + each, 0, mask=each < EXPERTS)
        if TILE > 0:
            for start in range(0, tile_count, EXPERTS_POWER):
                tl.store(tile_expert + start + each, -1, mask=start + each < tile_count)
        return
    EVEN: tl.constexpr = WIDTH % BK == 0
    squares = tl.zeros((BM, BK), tl.float32)
    # Copied ahead like the product's operands: loads that each wait for the memory take longer than all else.
    for start in tl.range(0, WIDTH, BK, num_stages=STAGES):
        values = _row_tile(hidden, row, there, start + tl.arange(0, BK), WIDTH, EVEN)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None]
    expert = part * BE + tl.arange(0, BE)
    router_rows = router + tl.minimum(expert, EXPERTS - 1)[:, None] * WIDTH
    dtype: tl.constexpr = normed.dtype.element_ty
    sums = tl.zeros((BE, BM), tl.float32)
    for start in tl.range(0, WIDTH, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        x = _row_tile(hidden, row, there, k, WIDTH, EVEN) * scale
        if EVEN:
            gains = tl.load(gain + k)
            w = tl.load(router_rows + k[None, :])
        else:
            gains = tl.load(gain + k, mask=k < WIDTH, other=0.0)
            w = tl.load(router_rows + k[None, :], mask=(k < WIDTH)[None, :], other=0.0)
        if gain.dtype.element_ty == dtype:
            x = x.to(dtype).to(tl.float32)
        x = (x * gains.to(tl.float32)[None, :]).to(dtype)
        mask = stores_norm[:, None] & (k < WIDTH)[None, :]
        tl.store(normed + row.to(tl.int64)[:, None] * WIDTH + k[None, :], x, mask=mask)
        sums = tl.dot(w.to(DOT), tl.trans(x).to(DOT), sums, input_precision="ieee")
    at = logits + row.to(tl.int64)[None, :] * EXPERTS + expert[:, None]
    tl.store(at, sums, mask=there[None, :] & (expert < EXPERTS)[:, None])
    if ON_CHIP:
        tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived + tile, 0)
        _choose(
            logits, ids, weights, counts + tile * EXPERTS, taken_in_all, tile_expert, tile_entry, tile_count,
            row, there, rows, EXPERTS, EXPERTS_POWER, TOP_K, TOP_K_POWER, NORMALISE, BM, TILE,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RouterTuning:
    """Tiles of the router: `rows` of a tile, `experts` of a program and `width` along the row; powers of two,
    16 at least."""

    rows: int = 16
    experts: int = 16
    width: int = 128
    stages: int = 3
    warps: int = 4


UNTUNED_ROUTER = RouterTuning()


@dataclass(frozen=True, slots=True)
class RouterSpace:
    """Memory of the router for up to R rows, with `tuning`: `logits` [R, E] float32; `counts` [tiles of rows,
    E] int32, how many of a tile's rows take each expert; `arrived` [tiles] int32, how many programs of a tile
    have ended, zeros between launches."""

    tuning: RouterTuning
    logits: Tensor
    counts: Tensor
    arrived: Tensor

    @classmethod
    def empty(
        cls, rows: int, experts: int, device: torch.device | str, tuning: RouterTuning = UNTUNED_ROUTER
    ) -> RouterSpace:
        tiles = triton.cdiv(rows, tuning.rows)
        return cls(
            tuning,
            logits=torch.empty(rows, experts, dtype=torch.float32, device=device),
            counts=torch.empty(tiles, experts, dtype=torch.int32, device=device),
            arrived=torch.zeros(tiles, dtype=torch.int32, device=device),
        )


def gathers(tiles: Tiles, rows: int, tuning: RouterTuning) -> bool:
    """True if `route_rows` of `rows` rows gathers their entries into such tiles."""
    return rows <= tuning.rows <= tiles.tile_rows


def route_rows(
    normed: Tensor,
    ids: Tensor,
    weights: Tensor,
    hidden: Tensor,
    norm: Norm,
    router: Tensor,
    present: Tensor,
    taken: Tensor,
    space: RouterSpace,
    *,
    normalise: bool,
    tiles: Tiles | None = None,
    early: bool = False,
) -> None:
    """Norms rows and chooses their experts: hidden [R, H], router [E, H] → normed [R, H] in hidden's dtype,
    ids [R, k] int32, weights [R, k] float32, as `rms_norm` and `route` of the reference compute them, and the
    space's counts.

    `present` [R] int32: a row where it is negative gets the expert -1; its norm and weights are not written.
    `taken` [E] int64: rows that take each expert are added. `tiles`: where rows are no more than a tile of
    the router, which is no larger than a tile of these: their entries are gathered as by `align_rows`.
    `early`: see `dependent_launch`.
    Raises ValueError for shapes that do not fit.
    """
    (rows, width), (experts, top_k) = hidden.shape, (router.shape[0], ids.shape[1])
    if normed.shape != hidden.shape or router.shape[1] != width or norm.gain.shape[0] != width:
        raise ValueError(f"hidden {tuple(hidden.shape)}, router {tuple(router.shape)} and norm do not fit")
    if not ids.shape == weights.shape == (rows, top_k) or top_k > experts or len(present) != rows:
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} are not of {rows} rows")
    if space.logits.shape[0] < rows or space.logits.shape[1] != experts:
        raise ValueError(f"logits {tuple(space.logits.shape)} do not hold {rows} rows of {experts}")
    tuning = space.tuning
    if tiles is not None and not gathers(tiles, rows, tuning):
        raise ValueError(f"{rows} rows by {tuning} are not gathered into tiles of {tiles.tile_rows}")
    narrow = ON_CHIP.value and hidden.dtype == router.dtype and hidden.dtype.itemsize == 2
    _route[(triton.cdiv(rows, tuning.rows), triton.cdiv(experts, tuning.experts))](
        hidden,
        norm.gain,
        router,
        present,
        normed,
        ids,
        weights,
        taken,
        space.logits,
        space.counts,
        space.arrived,
        ids if tiles is None else tiles.expert,
        ids if tiles is None else tiles.entry,
        0 if tiles is None else len(tiles.expert),
        norm.eps,
        rows,
        WIDTH=width,
        EXPERTS=experts,
        EXPERTS_POWER=triton.next_power_of_2(experts),
        TOP_K=top_k,
        TOP_K_POWER=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        BM=tuning.rows,
        BE=tuning.experts,
        BK=tuning.width,
        STAGES=tuning.stages,
        DOT=getattr(tl, str(hidden.dtype).removeprefix("torch.")) if narrow else tl.float32,
        TILE=0 if tiles is None else tiles.tile_rows,
        EARLY=early,
        num_warps=tuning.warps,
        **dependent_launch(early),
    )
