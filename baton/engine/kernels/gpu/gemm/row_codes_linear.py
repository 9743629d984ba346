"""A few rows times a weight matrix of fp8 or int8 codes, where the rows become codes of 8 bits on the way.

    out = epilogue(norm(x) · Wᵀ + bias), the epilogues of `skinny_linear`

Each program makes codes of the tiles of x that it multiplies: a scale for each row and tile, max |tile row| /
most. The rows are few, so this takes fewer instructions than there is time for while W streams by, and saves
the launch of a kernel that only makes codes. An RMSNorm is folded in as well: x is multiplied by the gains
before it becomes codes, its squares are gathered, and their mean scales the sums at the end.

Sums over a tile are those of the units: of e4m3 in float32, of int8 exact. They are scaled and added up in
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.code_values import INT8, KINDS
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, finish_tile, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_format import WeightFormat

_MOST = {"fp8": 448.0, "int8": 127.0}


@triton.jit
def _codes_of(values, KIND: tl.constexpr, dtype: tl.constexpr, MOST: tl.constexpr):
    """values [BK, BM] float32 → codes, and the scale of each column [BM]."""
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1e-30)
    units = values * (MOST / largest)[None, :]
    if KIND == INT8:
        units = tl.floor(units + 0.5)
    return units.to(dtype), largest / MOST


@triton.jit
def _product(codes, k, xs, K, KIND: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr):
    """Codes at pointers [BN, 1] + k times codes of x [BK, BM], float32."""
    places = codes + k[None, :]
    w = tl.load(places) if EVEN else tl.load(places, mask=(k < K)[None, :], other=0.0)
    if KIND == INT8:
        return tl.dot(w, xs, out_dtype=tl.int32).to(tl.float32)
    else:
        return tl.dot(w, xs, max_num_imprecise_acc=BK if BK < 128 else 128)


@triton.jit(do_not_specialize=["M"])
def _row_codes(
    x, gain, codes, scales, bias, out, partial, arrived, eps, M, N, K, GROUPS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, MOST: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows_tile = tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    m = rows_tile * BM + tl.arange(0, BM)
    # Rows past the end are read from the last, and never stored: no mask on the way.
    rows = tl.minimum(n, N - 1)
    up_rows = rows + N
    w_rows = codes + rows.to(tl.int64)[:, None] * K
    u_rows = codes + up_rows.to(tl.int64)[:, None] * K
    x_rows = x + tl.minimum(m, M - 1)[None, :] * K
    per_split = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    begin = split * per_split
    dtype: tl.constexpr = codes.dtype.element_ty
    sums = tl.zeros((BN, BM), tl.float32)
    ups = tl.zeros((BN, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + per_split, K), BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        if EVEN:
            values = tl.load(x_rows + k[:, None]).to(tl.float32)
        else:
            values = tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(values * values, 0)
            if EVEN:
                values *= tl.load(gain + k).to(tl.float32)[:, None]
            else:
                values *= tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
        xs, x_scale = _codes_of(values, KIND, dtype, MOST)
        part = _product(w_rows, k, xs, K, KIND, EVEN, BK) * x_scale[None, :]
        if GROUP != 0:
            part *= tl.load(scales + (rows // SCALE_ROWS) * GROUPS + start // GROUP)[:, None]
        sums += part
        if EPILOGUE >= 2:
            part = _product(u_rows, k, xs, K, KIND, EVEN, BK) * x_scale[None, :]
            if GROUP != 0:
                part *= tl.load(scales + (up_rows // SCALE_ROWS) * GROUPS + start // GROUP)[:, None]
            ups += part
    if HAS_NORM:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        sums *= scale
        ups *= scale
    if GROUP == 0:
        sums *= tl.load(scales + rows)[:, None]
        if EPILOGUE >= 2:
            ups *= tl.load(scales + up_rows)[:, None]
    finish_tile(
        sums, ups, bias, out, partial, arrived, n, m, tile, rows_tile, split, M, N, BM, BN, SPLITS, EPILOGUE,
        HAS_BIAS,
    )  # fmt: skip


def row_codes_fit(weight_format: WeightFormat, width: int) -> bool:
    """True if tiles of `width` columns are for this format: fp8 or int8 whose scales are not of fewer
    columns."""
    return weight_format.codes in _MOST and (
        weight_format.scale_columns == 0 or weight_format.scale_columns % width == 0
    )


def row_codes_linear(
    out: Tensor,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    norm: Norm | None,
    tuning: SkinnyTuning,
    space: SplitSpace | None = None,
) -> None:
    """Multiplies by a quantised weight, with x as codes: x [M, K], weight [N, K] (gated: [2 N, K]), out [M,
    N] of x's dtype, contiguous.

    A norm is for products without splits, since each program needs whole rows. With splits, `space` holds at
    least `split_space_needed`. Raises ValueError for what does not fit.
    """
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    (m, k), weight_format = x.shape, weight.format
    if weight.shape[1] != k or tuple(out.shape) != (m, n) or not row_codes_fit(weight_format, tuning.width):
        raise ValueError(
            f"x {tuple(x.shape)}, out {tuple(out.shape)} and {tuning} do not fit {weight_format.name} "
            f"{weight.shape}"
        )
    if norm is not None and (tuning.splits > 1 or norm.gain.shape != (k,)):
        raise ValueError(f"a norm of {tuple(norm.gain.shape)} in {tuning.splits} splits of {k}")
    if not (x.is_contiguous() and out.is_contiguous() and all(t.is_contiguous() for t in weight.tensors())):
        raise ValueError("x, weight and out must be contiguous")
    elements, tiles = split_space_needed(m, n, tuning, epilogue)
    if tiles and (space is None or not space.holds(elements, tiles)):
        raise ValueError(f"{tuning.splits} splits need a space of {elements} elements and {tiles} tiles")
    _row_codes[(triton.cdiv(n, tuning.columns), tuning.splits, triton.cdiv(m, tuning.rows))](
        x,
        x if norm is None else norm.gain,
        weight.codes,
        weight.scales,
        out if bias is None else bias,
        out,
        out if space is None else space.partial,
        out if space is None else space.arrived,
        0.0 if norm is None else norm.eps,
        m,
        n,
        k,
        weight.scales.shape[1],
        BM=tuning.rows,
        BN=tuning.columns,
        BK=tuning.width,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        EVEN=k % tuning.width == 0,
        KIND=KINDS[weight_format.codes],
        MOST=_MOST[weight_format.codes],
        SCALE_ROWS=weight_format.scale_rows,
        GROUP=weight_format.scale_columns,
        num_warps=tuning.warps,
    )
