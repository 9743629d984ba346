"""`grouped_linear` with experts in fewer bits, whose tiles are dequantised in registers (`quantized_linear`).

Codes become numbers of x's dtype, exactly. Scales of whole rows multiply the sums at the end, those of groups
of columns the sums of their group, in float32. Rows are counted through the stack of all experts: none of
them ends within a block of scales.

Where x is e4m3 codes too, with a scale a row (`quantize_rows`), the matrix units multiply codes by codes: no
code becomes a number first, which takes longer than reading them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP, dependent_launch, wait_for_previous
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.experts.align_rows import Tiles
from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning, store_tile, tile_rows
from baton.engine.kernels.gpu.gemm.code_values import INT4, KINDS
from baton.engine.kernels.gpu.gemm.quantized_linear import add_code_tile, add_int4_span, fits
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat


@triton.jit
def _grouped_codes(
    x, x_scales, codes, scales, zeros, out, tile_expert, tile_entry, N, K, ROW_BYTES, GROUPS, top_k,
    TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr,
    EVEN: tl.constexpr, KIND: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, DOT: tl.constexpr, X_CODES: tl.constexpr, EARLY: tl.constexpr,
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
    rows = expert * halves * N + tl.minimum(n, N - 1)
    up_rows = rows + N
    w_rows = codes + rows.to(tl.int64)[:, None] * ROW_BYTES
    u_rows = w_rows + N.to(tl.int64) * ROW_BYTES
    x_rows = x + source.to(tl.int64)[None, :] * K
    sums = tl.zeros((BN, TILE), tl.float32)
    ups = tl.zeros((BN, TILE), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if KIND == INT4:
            sums = add_int4_span(
                w_rows, scales, zeros, x_rows, rows, start, sums, K, GROUPS, GROUP, HAS_ZEROS, EVEN, DOT
            )
        else:
            sums = add_code_tile(
                w_rows, scales, x_rows, rows, start, sums, K, GROUPS, KIND, BK, SCALE_ROWS, GROUP, EVEN, DOT,
                X_CODES,
            )  # fmt: skip
        if EPILOGUE >= 2:
            if KIND == INT4:
                ups = add_int4_span(
                    u_rows, scales, zeros, x_rows, up_rows, start, ups, K, GROUPS, GROUP, HAS_ZEROS, EVEN, DOT
                )
            else:
                ups = add_code_tile(
                    u_rows, scales, x_rows, up_rows, start, ups, K, GROUPS, KIND, BK, SCALE_ROWS, GROUP, EVEN,
                    DOT, X_CODES,
                )  # fmt: skip
    if X_CODES:
        x_scale = tl.load(x_scales + source)[None, :]
        sums *= x_scale
        ups *= x_scale
    if GROUP == 0:
        sums *= tl.load(scales + rows)[:, None]
        if EPILOGUE >= 2:
            ups *= tl.load(scales + up_rows)[:, None]
    store_tile(sums, ups, out, n, target, there, N, EPILOGUE)


def grouped_codes_fit(weight_format: WeightFormat) -> bool:
    """True if there is a kernel for experts in this format: fp8 by rows or by blocks of whole tiles, int4 by
    groups."""
    if weight_format.codes == "int4":
        return fits(weight_format, INT4_SPAN)
    return weight_format.codes == "fp8" and fits(weight_format, _most_width(weight_format))


def check_fits(weight_format: WeightFormat, rows: int) -> None:
    """Raises ValueError for experts of `rows` rows each in a format for which there is no kernel: not one of
    `grouped_codes_fit`, or with blocks of scales that an expert ends within."""
    if not grouped_codes_fit(weight_format) or rows % weight_format.scale_rows:
        raise ValueError(f"no kernel for experts of {rows} rows in {weight_format.name}")


def takes_codes(weight_format: WeightFormat) -> bool:
    """True if x may be e4m3 codes where experts are in this format: fp8."""
    return weight_format.codes == "fp8" and grouped_codes_fit(weight_format)


def grouped_codes(
    out: Tensor,
    x: Tensor,
    weight: QuantizedWeight,
    tiles: Tiles,
    top_k: int,
    epilogue: Epilogue,
    tuning: GroupedTuning,
    x_scales: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """Computes `grouped_linear` with the stack's codes [E · N, K] in a format of `grouped_codes_fit`; the
    caller checks shapes. `x_scales`: x is codes with these scales. Tiles are no wider than a group of fp8's
    columns, and as wide as a span of int4."""
    weight_format, (_, k) = weight.format, weight.shape
    n, count = out.shape[1], len(tiles.expert)
    width = INT4_SPAN if weight_format.codes == "int4" else min(tuning.width, _most_width(weight_format))
    by_float32 = out.dtype.itemsize > 2 or not ON_CHIP.value
    _grouped_codes[(triton.cdiv(n, tuning.columns), count)](
        x,
        weight.scales if x_scales is None else x_scales,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        tiles.expert,
        tiles.entry,
        n,
        k,
        weight.codes[0].numel(),
        weight.scales.shape[1],
        top_k,
        TILE=tiles.tile_rows,
        BN=tuning.columns,
        BK=width,
        STAGES=tuning.stages,
        EPILOGUE=int(epilogue),
        EVEN=k % width == 0,
        KIND=KINDS[weight_format.codes],
        SCALE_ROWS=weight_format.scale_rows,
        GROUP=weight_format.scale_columns,
        HAS_ZEROS=weight.zeros is not None,
        DOT=tl.float32 if by_float32 else getattr(tl, str(out.dtype).removeprefix("torch.")),
        X_CODES=x_scales is not None,
        EARLY=early,
        num_warps=tuning.warps,
        **dependent_launch(early),
    )


def _most_width(weight_format: WeightFormat) -> int:
    """Columns of a tile of fp8 codes, at most: those that share a scale."""
    return min(INT4_SPAN, weight_format.scale_columns or INT4_SPAN)
