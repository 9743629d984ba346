"""Launches a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.expert_tiles import (
    LIBRARY_ROWS,
    MOST_ROWS,
    MOST_ROWS_OF_DECODE,
    rows_by_entry,
    rows_of_tile,
)
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.experts.align_rows import EntryPlaces, Tiles, align_rows
from baton.engine.kernels.gpu.experts.combine_rows import combine_rows
from baton.engine.kernels.gpu.experts.entry_products import add_down_entries, gate_up_entries
from baton.engine.kernels.gpu.experts.grouped_codes import takes_codes
from baton.engine.kernels.gpu.experts.grouped_linear import grouped_linear
from baton.engine.kernels.gpu.experts.library_product import library_multiplies, product_by_library
from baton.engine.kernels.gpu.experts.route_rows import RouterSpace, RouterTuning, gathers, route_rows
from baton.engine.kernels.gpu.gemm.quantize_rows import quantize_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.model.modules import Model

# Tiles of the router in steps of few rows, in decode steps of more, and in passes of prompts.
_ROW_ROUTER, _ROW_ROUTER_ROWS = RouterTuning(rows=1, experts=4), 64
_FEW_ROWS_ROUTER = RouterTuning(width=256, stages=4)
_MANY_ROWS_ROUTER = RouterTuning(rows=64, experts=64, warps=8)


def router_tuning(rows: int) -> RouterTuning:
    """The router's tiles in passes of up to `rows` rows, with the same sums for any number of them."""
    return _FEW_ROWS_ROUTER if rows <= MOST_ROWS_OF_DECODE else _MANY_ROWS_ROUTER


def router_tuning_of_step(rows: int) -> RouterTuning:
    """The router's tiles in steps of `rows` rows of mode `fast`."""
    return _ROW_ROUTER if rows <= _ROW_ROUTER_ROWS else router_tuning(rows)


@dataclass(frozen=True, slots=True)
class ExpertsSpace:
    """Memory that the mixtures of a pass of up to R rows share. `present` [R] int32: negative for a row that
    holds no token, and takes no expert; `normed` [R, hidden]; `ids`, `weights` [R, k]; `router` and `tiles`,
    and for few rows `row_router`; up to `entry_rows` rows need no tiles, since each entry is computed by
    itself (`entry_products`); `inner` [places of tiles, inner width]; `results` [R · k,
    hidden]; `codes` e4m3 and `code_scales`, of the rows of `normed` or of `inner`: without elements where
    experts take none. `large_tiles` and `places`: of steps of many rows, whose `down` is the library's."""

    present: Tensor
    normed: Tensor
    router: RouterSpace
    row_router: RouterSpace
    ids: Tensor
    weights: Tensor
    tiles: Tiles
    entry_rows: int
    large_tiles: Tiles | None
    places: EntryPlaces | None
    inner: Tensor
    results: Tensor
    codes: Tensor
    code_scales: Tensor

    @classmethod
    def of(cls, model: Model, rows: int, *, exact: bool = False) -> ExpertsSpace | None:
        """Zeros for up to `rows` rows; None for a model without experts. `exact`: any number of rows is
        computed by the same tiles; else few rows are computed entry by entry, and more are multiplied as
        codes where experts are fp8 and rows have 16 bits."""
        config, device, dtype = model.config, model.device, model.precision.activations
        if config.experts is None:
            return None
        experts, top_k, width = config.experts.count, config.experts.top_k, config.hidden_size
        tiles = Tiles.empty(rows, top_k, experts, device, rows_of_tile(rows))
        few = rows <= MOST_ROWS_OF_DECODE and not exact
        entry_rows = rows_by_entry(top_k, experts) if few else 0
        mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsMlp)]
        stacks, downs = [mlp.gate_up for mlp in mixtures], [mlp.down for mlp in mixtures]
        by_codes = not exact and dtype.itemsize == 2 and all(map(_takes_codes, stacks))
        by_library = not exact and rows >= LIBRARY_ROWS and all(map(library_multiplies, downs))
        large_tiles = Tiles.empty(rows, top_k, experts, device, MOST_ROWS) if by_library else None
        most_places = (large_tiles or tiles).entry.numel()
        places, inner = (most_places, config.experts.intermediate_size) if by_codes else (0, 0)
        return cls(
            codes=torch.zeros(
                max(rows * width, places * inner) if by_codes else 0, dtype=torch.float8_e4m3fn, device=device
            ),
            code_scales=torch.zeros(max(rows, places) if by_codes else 0, device=device),
            present=torch.zeros(rows, dtype=torch.int32, device=device),
            normed=torch.zeros(rows, width, dtype=dtype, device=device),
            router=RouterSpace.empty(rows, experts, device, router_tuning(rows)),
            row_router=RouterSpace.empty(
                0 if exact else min(rows, _ROW_ROUTER_ROWS), experts, device, _ROW_ROUTER
            ),
            ids=torch.zeros(rows, top_k, dtype=torch.int32, device=device),
            weights=torch.zeros(rows, top_k, device=device),
            tiles=tiles,
            entry_rows=entry_rows,
            large_tiles=large_tiles,
            places=EntryPlaces.empty(rows, top_k, experts, device) if by_library else None,
            inner=torch.zeros(most_places, config.experts.intermediate_size, dtype=dtype, device=device),
            results=torch.zeros(
                (LIBRARY_ROWS if by_library else rows) * top_k, width, dtype=dtype, device=device
            ),
        )

    def codes_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the codes of rows x [N, K], and a scale a row [N]: valid until the next call."""
        return self.codes[: x.numel()].view(x.shape), self.code_scales[: len(x)]

    def as_codes(self, x: Tensor, present: Tensor | None, *, early: bool) -> tuple[Tensor, Tensor]:
        """x [N, K] → `codes_of` it; rows where `present` [N] is negative are left out."""
        codes, scales = self.codes_of(x)
        quantize_rows(codes, scales, x, present=present, early=early)
        return codes, scales

    def behind(self, first: int) -> ExpertsSpace:
        """The same memory, but `present` of the rows from `first` on."""
        return replace(self, present=self.present[first:])


def _takes_codes(stack: WeightStack) -> bool:
    return isinstance(stack.weight, QuantizedWeight) and takes_codes(stack.weight.format)


def run_experts(space: ExpertsSpace, mlp: ExpertsMlp, hidden: Tensor, *, early: bool | None = None) -> None:
    """Adds the mixture's MLP: hidden [M, hidden] += mixture(hidden). Rows that are not present stay as they
    are. `early`: launches begin before those before them have ended (`dependent_launch`); None: where it is
    faster."""
    if mlp.residual.post_norm is not None:
        raise ValueError("no kernel norms the sum of experts")
    rows = len(hidden)
    router = space.row_router if rows <= len(space.row_router.logits) else space.router
    if rows <= space.entry_rows:
        _run_entries(space, mlp, hidden, router, early=True if early is None else early)
        return
    if early is None:
        # Measured on an H200: a step of 128 rows takes 0.8 % less with it; those of 32 and 64, whose router
        # began early as well, took 5 and 6 % longer.
        early = space.codes.numel() > 0 and router.tuning.rows > 1 and rows <= MOST_ROWS_OF_DECODE
    _run_tiles(space, mlp, hidden, router, early=early)


def _run_entries(
    space: ExpertsSpace, mlp: ExpertsMlp, hidden: Tensor, router: RouterSpace, *, early: bool
) -> None:
    rows = len(hidden)
    normed, ids, weights = space.normed[:rows], space.ids[:rows], space.weights[:rows]
    route_rows(
        normed, ids, weights, hidden, mlp.norm, mlp.router, space.present[:rows], mlp.taken, router,
        normalise=mlp.normalise, early=early,
    )  # fmt: skip
    inner = space.inner[: ids.numel()]
    gate_up_entries(inner, normed, ids, mlp.gate_up, mlp.gate, early=early)
    add_down_entries(hidden, inner, ids, weights, mlp.down, early=early)


def _run_tiles(
    space: ExpertsSpace, mlp: ExpertsMlp, hidden: Tensor, router: RouterSpace, *, early: bool
) -> None:
    rows, (experts, _, _) = len(hidden), mlp.gate_up.shape
    normed, ids, weights = space.normed[:rows], space.ids[:rows], space.weights[:rows]
    large = space.large_tiles if rows >= LIBRARY_ROWS else None
    tiles = (large or space.tiles).of_rows(rows, mlp.top_k, experts)
    gathered, by_codes = gathers(tiles, rows, router.tuning), space.codes.numel() > 0
    places = space.places if large else None
    # Where a program of the router has a whole row, it stores the row's codes itself.
    routes_codes = by_codes and router.tuning.rows == 1
    x, scales = space.codes_of(normed) if routes_codes else (normed, None)
    # The many programs of a router by rows would wait where those of the launch before have yet to run.
    route_rows(
        x, ids, weights, hidden, mlp.norm, mlp.router, space.present[:rows], mlp.taken, router,
        normalise=mlp.normalise, scales=scales, tiles=tiles if gathered else None,
        early=early and router.tuning.rows > 1,
    )  # fmt: skip
    if not gathered:
        align_rows(tiles, ids, router.counts, router.tuning.rows, places, early=early)
    if by_codes and not routes_codes:
        x, scales = space.as_codes(normed, None, early=early)
    grouped_linear(space.inner, x, mlp.gate_up, tiles, mlp.top_k, mlp.gate, x_scales=scales, early=early)
    inner = space.inner[: tiles.entry.numel()]
    if places is not None:
        results = product_by_library(inner, mlp.down, places.ends)
    else:
        results = space.results[: rows * mlp.top_k]
        x, scales = space.as_codes(inner, tiles.entry.view(-1), early=early) if by_codes else (inner, None)
        grouped_linear(results, x, mlp.down, tiles, mlp.top_k, Epilogue.PLAIN, x_scales=scales, early=early)
    of_entries = None if places is None else places.place[: ids.numel()]
    combine_rows(hidden, results, ids, weights, of_entries, early=early)
