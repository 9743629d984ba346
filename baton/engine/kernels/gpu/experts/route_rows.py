"""The norm before a mixture, and each row's experts.

A program multiplies a tile of rows by a part of the router, on the matrix units. The last of a tile's
programs to arrive has all logits of its rows, and takes their softmax and the best experts. A row's result
depends on the tiles (`RouterTuning`) alone, neither on its place nor on the other rows.

With few rows a program multiplies one by a smaller part (`route_row`), so that more programs read the router.

Where all rows are one tile, the last program gathers their entries into the tiles of the experts' products
too, in place of `align_rows`: each expert that is taken has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP, dependent_launch, wait_for_previous
from baton.engine.kernels.expert_tiles import FEW_ROWS
from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.gpu.experts.align_rows import Tiles
from baton.engine.kernels.gpu.experts.choose_experts import choose_experts, gather_entries
from baton.engine.kernels.gpu.experts.route_row import route_row


@triton.jit
def _row_tile(hidden, row, there, k, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """[BM, BK] of hidden in float32; zeros in rows that are not there."""
    mask = there[:, None] if EVEN else there[:, None] & (k < WIDTH)[None, :]
    at = hidden + row.to(tl.int64)[:, None] * WIDTH + k[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


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
        numbers, takes = choose_experts(
            logits, ids, weights, counts + tile * EXPERTS, taken_in_all, row, there, rows,
            EXPERTS, EXPERTS_POWER, TOP_K, TOP_K_POWER, NORMALISE, BM,
        )  # fmt: skip
        if TILE > 0:
            gather_entries(
                tile_expert, tile_entry, tile_count, row, there, numbers, takes, EXPERTS_POWER, TOP_K,
                TOP_K_POWER, TILE,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RouterTuning:
    """Tiles of the router: `rows` of a tile, `experts` of a program and `width` along the row; powers of two,
    16 at least. Or one row (`route_row`): any power of two of experts, and the whole row at once."""

    rows: int = 16
    experts: int = 16
    width: int = 128
    stages: int = 3
    warps: int = 4


UNTUNED_ROUTER = RouterTuning()
# Values of the router that a thread of `route_row` multiplies, about, and its warps.
_VALUES_A_THREAD, _LEAST_WARPS, _MOST_WARPS = 64, 4, 16


@dataclass(frozen=True, slots=True)
class RouterSpace:
    """Memory of the router for up to R rows, with `tuning`: `logits` [R, E] float32; `counts` [tiles of rows,
    E] int32, how many of a tile's rows take each expert; `arrived` [tiles + 1] int32, how many programs of a
    tile have ended, and how many tiles, zeros between launches."""

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
            arrived=torch.zeros(tiles + 1, dtype=torch.int32, device=device),
        )


def gathers(tiles: Tiles, rows: int, tuning: RouterTuning) -> bool:
    """True if `route_rows` of `rows` rows gathers their entries into such tiles."""
    return rows <= (FEW_ROWS if tuning.rows == 1 else tuning.rows) <= tiles.tile_rows


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
    scales: Tensor | None = None,
    tiles: Tiles | None = None,
    early: bool = False,
) -> None:
    """Norms rows and chooses their experts: hidden [R, H], router [E, H] → normed [R, H] in hidden's dtype,
    ids [R, k] int32, weights [R, k] float32, as `rms_norm` and `route` of the reference compute them, and the
    space's counts.

    `scales` [R] float32: normed gets e4m3 codes with these scales, those of `quantize_rows`, which only a
    program of one row can make.
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
    if scales is not None and (tuning.rows > 1 or scales.shape != (rows,)):
        raise ValueError(f"{tuning} makes no codes of {rows} rows with scales {tuple(scales.shape)}")
    if tiles is not None and not gathers(tiles, rows, tuning):
        raise ValueError(f"{rows} rows by {tuning} are not gathered into tiles of {tiles.tile_rows}")
    into = (normed, ids, weights, taken, space.logits, space.counts, space.arrived)
    gathered = (ids, ids, 0) if tiles is None else (tiles.expert, tiles.entry, len(tiles.expert))
    parts = triton.cdiv(rows, tuning.rows), triton.cdiv(experts, tuning.experts)
    kernel, options = _kernel(tuning, hidden, router, scales)
    kernel[parts](
        hidden, norm.gain, router, present, *into, *gathered, norm.eps, rows,
        WIDTH=width,
        EXPERTS=experts,
        EXPERTS_POWER=triton.next_power_of_2(experts),
        TOP_K=top_k,
        TOP_K_POWER=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        BE=tuning.experts,
        TILE=0 if tiles is None else tiles.tile_rows,
        EARLY=early,
        **options,
        **dependent_launch(early),
    )  # fmt: skip


def _kernel(
    tuning: RouterTuning, hidden: Tensor, router: Tensor, scales: Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """The kernel of a tuning, and the arguments that are its own."""
    if tuning.rows == 1:
        width = triton.next_power_of_2(hidden.shape[1])
        warps = tuning.experts * width // (32 * _VALUES_A_THREAD)
        return route_row, {
            "scales": hidden if scales is None else scales, "CODES": scales is not None,
            "WIDTH_POWER": width, "MOST": FEW_ROWS,
            "num_warps": min(max(warps, _LEAST_WARPS), _MOST_WARPS),
        }  # fmt: skip
    narrow = ON_CHIP.value and hidden.dtype == router.dtype and hidden.dtype.itemsize == 2
    return _route, {
        "BM": tuning.rows, "BK": tuning.width, "STAGES": tuning.stages, "num_warps": tuning.warps,
        "DOT": getattr(tl, str(hidden.dtype).removeprefix("torch.")) if narrow else tl.float32,
    }  # fmt: skip
