"""A few rows times a quantised weight matrix: `skinny_linear` whose tiles of W are dequantised in registers.

    out = epilogue(x · Wᵀ + bias), the epilogues of `skinny_linear`

Codes become numbers of x's dtype, exactly. Scales of whole rows multiply the sums at the end, those of groups
of columns the sums of their group, in float32.

Where x is codes of 8 bits too, with a scale a row (`quantize_rows`), the matrix units multiply codes by
codes: e4m3 with sums that are float32 after every 128 columns, int8 exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.code_values import INT4, INT8, KINDS, code_values, int4_values
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, finish_tile, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat

_HALF_SPAN = tl.constexpr(INT4_SPAN // 2)


@triton.jit
def add_int4_span(codes, scales, zeros, x_rows, rows, start, sums, K, GROUPS,
          GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Adds the products of 128 columns of int4 to `sums` [BN, BM]. `codes`: pointers to the rows' codes
    [BN, 1], `x_rows` to x [1, BM]; `rows`: the numbers of the rows [BN]."""
    WIDTH: tl.constexpr = _HALF_SPAN if GROUP == 0 else (GROUP if GROUP < _HALF_SPAN else _HALF_SPAN)
    for part in tl.static_range(_HALF_SPAN // WIDTH):
        inside = tl.arange(0, WIDTH) + part * WIDTH
        low_k = inside + start
        high_k = low_k + _HALF_SPAN
        taken = tl.load(codes + (inside + start // 2)[None, :])
        if EVEN:
            low_x = tl.load(x_rows + low_k[:, None])
            high_x = tl.load(x_rows + high_k[:, None])
        else:
            low_x = tl.load(x_rows + low_k[:, None], mask=(low_k < K)[:, None], other=0.0)
            high_x = tl.load(x_rows + high_k[:, None], mask=(high_k < K)[:, None], other=0.0)
        if GROUP == 0:
            low_group = 0
            high_group = 0
        else:
            low_group = tl.minimum((start + part * WIDTH) // GROUP, GROUPS - 1)
            high_group = tl.minimum((start + part * WIDTH + _HALF_SPAN) // GROUP, GROUPS - 1)
        if HAS_ZEROS:
            low_zero = tl.load(zeros + rows * GROUPS + low_group).to(tl.float32)[:, None]
            high_zero = tl.load(zeros + rows * GROUPS + high_group).to(tl.float32)[:, None]
        else:
            low_zero = tl.full((1, 1), 8.0, tl.float32)
            high_zero = low_zero
        low, high = int4_values(taken, low_zero, high_zero, DOT)
        low_x, high_x = low_x.to(DOT), high_x.to(DOT)
        if GROUP == 0:
            sums = tl.dot(low, low_x, sums, input_precision="ieee")
            sums = tl.dot(high, high_x, sums, input_precision="ieee")
        elif GROUP % 128 == 0:
            both = tl.dot(low, low_x, input_precision="ieee")
            both = tl.dot(high, high_x, both, input_precision="ieee")
            sums += both * tl.load(scales + rows * GROUPS + low_group)[:, None]
        else:
            low_scale = tl.load(scales + rows * GROUPS + low_group)[:, None]
            high_scale = tl.load(scales + rows * GROUPS + high_group)[:, None]
            sums += tl.dot(low, low_x, input_precision="ieee") * low_scale
            sums += tl.dot(high, high_x, input_precision="ieee") * high_scale
    return sums


@triton.jit
def add_code_tile(codes, scales, x_rows, rows, start, sums, K, GROUPS, KIND: tl.constexpr,
          BK: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
          DOT: tl.constexpr, X_CODES: tl.constexpr):  # fmt: skip
    """Adds the products of BK columns of fp8 or int8, like `add_int4_span`."""
    k = start + tl.arange(0, BK)
    if EVEN:
        w = tl.load(codes + k[None, :])
        xs = tl.load(x_rows + k[:, None])
    else:
        w = tl.load(codes + k[None, :], mask=(k < K)[None, :], other=0.0)
        xs = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0)
    if X_CODES and KIND == INT8:
        part = tl.dot(w, xs, sums, out_dtype=tl.int32)
    elif X_CODES:
        part = sums if GROUP == 0 else tl.zeros(sums.shape, tl.float32)
        part = tl.dot(w, xs, part, max_num_imprecise_acc=BK if BK < 128 else 128)
    elif GROUP == 0:
        part = tl.dot(code_values(w, KIND, DOT), xs.to(DOT), sums, input_precision="ieee")
    else:
        part = tl.dot(code_values(w, KIND, DOT), xs.to(DOT), input_precision="ieee")
    if GROUP == 0:
        return part
    else:
        return sums + part * tl.load(scales + (rows // SCALE_ROWS) * GROUPS + start // GROUP)[:, None]


@triton.jit(do_not_specialize=["M"])
def _quantized_skinny(
    x, x_scales, codes, scales, zeros, bias, out, partial, arrived, M, N, K, ROW_BYTES,
    GROUPS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr,
    X_CODES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows_tile = tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    m = rows_tile * BM + tl.arange(0, BM)
    # Rows past the end are read from the last, and never stored: no mask on the way.
    rows = tl.minimum(n, N - 1)
    up_rows = rows + N
    w_rows = codes + rows.to(tl.int64)[:, None] * ROW_BYTES
    x_rows = x + tl.minimum(m, M - 1)[None, :] * K
    per_split = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    begin = split * per_split
    # int8 codes times int8 codes: the tensor cores accumulate in integers.
    BY_INTEGERS: tl.constexpr = X_CODES and KIND == INT8
    sums = tl.zeros((BN, BM), tl.int32 if BY_INTEGERS else tl.float32)
    ups = tl.zeros((BN, BM), tl.int32 if BY_INTEGERS else tl.float32)
    for start in tl.range(begin, tl.minimum(begin + per_split, K), BK, num_stages=STAGES):
        if KIND == INT4:
            sums = add_int4_span(
                w_rows, scales, zeros, x_rows, rows, start, sums, K, GROUPS, GROUP, HAS_ZEROS, EVEN, DOT
            )
        else:
            sums = add_code_tile(
                w_rows, scales, x_rows, rows, start, sums, K, GROUPS, KIND, BK, SCALE_ROWS, GROUP,
                EVEN, DOT, X_CODES,
            )  # fmt: skip
        if EPILOGUE >= 2:
            u_rows = w_rows + N.to(tl.int64) * ROW_BYTES
            if KIND == INT4:
                ups = add_int4_span(
                    u_rows, scales, zeros, x_rows, up_rows, start, ups, K, GROUPS, GROUP, HAS_ZEROS, EVEN, DOT
                )
            else:
                ups = add_code_tile(
                    u_rows, scales, x_rows, up_rows, start, ups, K, GROUPS, KIND, BK, SCALE_ROWS,
                    GROUP, EVEN, DOT, X_CODES,
                )  # fmt: skip
    sums = sums.to(tl.float32)
    ups = ups.to(tl.float32)
    if X_CODES:
        x_scale = tl.load(x_scales + tl.minimum(m, M - 1))[None, :]
        sums *= x_scale
        ups *= x_scale
    if GROUP == 0:
        sums *= tl.load(scales + rows)[:, None]
        if EPILOGUE >= 2:
            ups *= tl.load(scales + up_rows)[:, None]
    finish_tile(
        sums, ups, bias, out, partial, arrived, n, m, tile, rows_tile, split, M, N, BM, BN, SPLITS, EPILOGUE,
        HAS_BIAS,
    )  # fmt: skip


def fits(weight_format: WeightFormat, width: int) -> bool:
    """True if tiles of `width` columns are for this format."""
    group = weight_format.scale_columns
    if weight_format.codes == "int4":
        return width == INT4_SPAN and (group in (0, 32) or group % (INT4_SPAN // 2) == 0)
    return group == 0 or group % width == 0


def quantized_linear(
    out: Tensor,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    tuning: SkinnyTuning,
    space: SplitSpace | None = None,
    x_scales: Tensor | None = None,
) -> None:
    """Multiplies by a quantised weight: x [M, K], weight [N, K] (gated: [2 N, K]), out [M, N] of x's dtype,
    contiguous.

    `tuning.width` is one that `fits` the format. With splits, `space` holds at least `split_space_needed`.
    `x_scales` [M] float32: x is codes, of the kind of the weight's. Raises ValueError for what does not fit.
    """
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    (m, k), weight_format = x.shape, weight.format
    _refuse(out, x, weight, (m, n, k), x_scales, tuning)
    elements, tiles = split_space_needed(m, n, tuning, epilogue)
    if tiles and (space is None or not space.holds(elements, tiles)):
        raise ValueError(f"{tuning.splits} splits need a space of {elements} elements and {tiles} tiles")
    by_float32 = out.dtype == torch.float32 or not ON_CHIP.value
    _quantized_skinny[(triton.cdiv(n, tuning.columns), tuning.splits, triton.cdiv(m, tuning.rows))](
        x,
        weight.scales if x_scales is None else x_scales,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias,
        out,
        out if space is None else space.partial,
        out if space is None else space.arrived,
        m,
        n,
        k,
        weight.codes[0].numel(),
        weight.scales.shape[1],
        BM=tuning.rows,
        BN=tuning.columns,
        BK=tuning.width,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        HAS_ZEROS=weight.zeros is not None,
        EVEN=k % tuning.width == 0,
        KIND=KINDS[weight_format.codes],
        SCALE_ROWS=weight_format.scale_rows,
        GROUP=weight_format.scale_columns,
        DOT=tl.float32 if by_float32 else getattr(tl, str(out.dtype).removeprefix("torch.")),
        X_CODES=x_scales is not None,
        num_warps=tuning.warps,
    )


def _refuse(
    out: Tensor,
    x: Tensor,
    weight: QuantizedWeight,
    shape: tuple[int, int, int],
    x_scales: Tensor | None,
    tuning: SkinnyTuning,
) -> None:
    (m, n, k), weight_format = shape, weight.format
    if weight.shape[1] != k or tuple(out.shape) != (m, n) or not fits(weight_format, tuning.width):
        raise ValueError(
            f"x {tuple(x.shape)}, out {tuple(out.shape)} and {tuning} do not fit "
            f"{weight_format.name} {weight.shape}"
        )
    if x_scales is not None and (x.dtype != weight.codes.dtype or x_scales.shape != (m,)):
        raise ValueError(f"codes of x, {x.dtype}, do not fit {weight_format.name}")
    if not (x.is_contiguous() and out.is_contiguous() and all(t.is_contiguous() for t in weight.tensors())):
        raise ValueError("x, weight and out must be contiguous")
