"""Products of tiles of rows with their experts' matrices: each matrix that is taken streams once a tile.

    SWIGLU, GEGLU   out[tile, place] = gate(x[row of the entry])     what `down` takes: [places, I]
    PLAIN           out[entry] = x[tile, place] · Wᵀ                 what `combine_rows` takes: [R · k, H]

As in `skinny_linear`, W's rows take the side of the product that the matrix units want long. A row's result
depends on the tiles (`GroupedTuning`) alone, not on its place nor on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP, dependent_launch, wait_for_previous
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.experts.align_rows import Tiles
from baton.engine.kernels.gpu.experts.grouped_codes import check_fits, grouped_codes, takes_codes
from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning, store_tile, tile_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.weight_stack import WeightStack


@triton.jit
def _grouped(
    x, stack, out, tile_expert, tile_entry, N, K, top_k,
    TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_previous()
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    source, target, there = tile_rows(tile_entry, tile, top_k, TILE, EPILOGUE)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    halves: tl.constexpr = 2 if EPILOGUE >= 2 else 1
    w_rows = stack + (expert.to(tl.int64) * halves * N + tl.minimum(n, N - 1))[:, None] * K
    x_rows = x + source.to(tl.int64)[None, :] * K
    sums = tl.zeros((BN, TILE), tl.float32)
    ups = tl.zeros((BN, TILE), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        w = _load(w_rows, k[None, :], K, EVEN, UPCAST)
        xs = _load(x_rows, k[:, None], K, EVEN, UPCAST)
        sums = tl.dot(w, xs, sums, input_precision="ieee")
        if EPILOGUE >= 2:
            u = _load(w_rows + N.to(tl.int64) * K, k[None, :], K, EVEN, UPCAST)
            ups = tl.dot(u, xs, ups, input_precision="ieee")
    store_tile(sums, ups, out, n, target, there, N, EPILOGUE)


@triton.jit
def _load(rows, k, K, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    values = tl.load(rows + k) if EVEN else tl.load(rows + k, mask=k < K, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


def chosen_tuning(x: Tensor, weight: Weight, tiles: Tiles, epilogue: Epilogue) -> GroupedTuning:
    """Returns the tuning by which `grouped_linear` computes a product unless another is given."""
    quantised = isinstance(weight, QuantizedWeight)
    return GroupedTuning.of(tiles.tile_rows, epilogue, x.dtype, quantised=quantised)


def grouped_linear(
    out: Tensor,
    x: Tensor,
    stack: WeightStack,
    tiles: Tiles,
    top_k: int,
    epilogue: Epilogue,
    tuning: GroupedTuning | None = None,
    x_scales: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """Multiplies rows by the weights of their experts, tile by tile.

    With a gated epilogue x [R, K], stack [E, 2 N, K], out [places, N]; with PLAIN x [places, K], stack [E, N,
    K], out [R · k, N]; `places` are at least those of all tiles. All contiguous; of one dtype, or the stack
    in fewer bits (`grouped_codes`). `x_scales` [rows of x] float32: x is e4m3 codes, for a stack of such.
    `early`: see `dependent_launch`.

    What no tile has is not written. Raises ValueError for shapes that do not fit, other formats and other
    epilogues.
    """
    (_, rows, k), count, weight = stack.shape, len(tiles.expert), stack.weight
    tuning = tuning or chosen_tuning(x, weight, tiles, epilogue)
    if epilogue is Epilogue.RESIDUAL:
        raise ValueError("no kernel adds the experts' products to out")
    n, places = (rows // 2, out.shape[0]) if epilogue.gated else (rows, x.shape[0])
    if x.shape[1] != k or out.shape[1] != n or places < tiles.entry.numel():
        raise ValueError(f"x {tuple(x.shape)}, out {tuple(out.shape)} and stack {stack.shape} do not fit")
    parts = weight.tensors() if isinstance(weight, QuantizedWeight) else [weight]
    if not all(tensor.is_contiguous() for tensor in (x, out, *parts)):
        raise ValueError("x, out and stack must be contiguous")
    if isinstance(weight, QuantizedWeight):
        check_fits(weight.format, rows)
        if x_scales is not None and (not takes_codes(weight.format) or len(x_scales) != len(x)):
            raise ValueError(f"{len(x_scales)} scales of codes {tuple(x.shape)} by {weight.format.name}")
        grouped_codes(out, x, weight, tiles, top_k, epilogue, tuning, x_scales, early=early)
        return
    _grouped[(triton.cdiv(n, tuning.columns), count)](
        x,
        weight,
        out,
        tiles.expert,
        tiles.entry,
        n,
        k,
        top_k,
        TILE=tiles.tile_rows,
        BN=tuning.columns,
        BK=tuning.width,
        STAGES=tuning.stages,
        EPILOGUE=int(epilogue),
        EVEN=k % tuning.width == 0,
        UPCAST=x.dtype == torch.float32 or not ON_CHIP.value,
        EARLY=early,
        num_warps=tuning.warps,
        **dependent_launch(early),
    )
