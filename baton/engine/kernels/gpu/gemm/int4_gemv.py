"""One row times a weight matrix of int4: `gemv` for codes of 4 bits.

    x · W[n] = Σ over groups of scale[n, group] · (Σ x · code - zero[n, group] · Σ x)

Each sum over a group's columns is made by few threads, and scaled as soon as it is there. Norms and epilogues
are those of `gemv`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gated
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat

_HALF_SPAN = INT4_SPAN // 2


@triton.jit
def _scaled(sums, x_sums, rows, group, scales, zeros, GROUPS, HAS_ZEROS: tl.constexpr):
    """Sums of codes [BN, S] and of x [S] in each group → those of the weights, [BN, S]."""
    places = rows[:, None] * GROUPS + group[None, :]
    scale = tl.load(scales + places)
    if HAS_ZEROS:
        return (sums - tl.load(zeros + places).to(tl.float32) * x_sums[None, :]) * scale
    else:
        return (sums - 8.0 * x_sums[None, :]) * scale


@triton.jit
def _products(codes, low_x, high_x, low_sums, high_sums, rows, low_group, high_group, scales, zeros, GROUPS,
              GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):  # fmt: skip
    """Bytes [BN, S, J] times x [S, J] → [BN, S], scaled."""
    taken = codes.to(tl.int32)
    low = (taken & 15).to(tl.float32) * low_x[None, :, :]
    high = (taken >> 4).to(tl.float32) * high_x[None, :, :]
    if GROUP % 128 == 0:
        return _scaled(
            tl.sum(low + high, 2), low_sums + high_sums, rows, low_group, scales, zeros, GROUPS, HAS_ZEROS
        )
    else:
        return _scaled(tl.sum(low, 2), low_sums, rows, low_group, scales, zeros, GROUPS, HAS_ZEROS) + _scaled(
            tl.sum(high, 2), high_sums, rows, high_group, scales, zeros, GROUPS, HAS_ZEROS
        )


@triton.jit
def _int4_gemv(
    x, codes, scales, zeros, bias, gain, out, eps, N, K, ROW_BYTES, GROUPS,
    BN: tl.constexpr, S: tl.constexpr, J: tl.constexpr, GROUP: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ZEROS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = n < N
    rows = tl.where(kept, n, 0)
    w_rows = codes + rows.to(tl.int64)[:, None, None] * ROW_BYTES
    sums = tl.zeros((BN, S), tl.float32)
    ups = tl.zeros((BN, S), tl.float32)
    squares = tl.zeros((S, J), tl.float32)
    for start in tl.range(0, ROW_BYTES, S * J, num_stages=STAGES):
        first = start + tl.arange(0, S) * J  # bytes of the row before each piece
        column = first // 64 * 128 + first % 64
        low_k = column[:, None] + tl.arange(0, J)[None, :]
        low_x = tl.load(x + low_k, mask=low_k < K, other=0.0).to(tl.float32)
        high_x = tl.load(x + low_k + 64, mask=low_k + 64 < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += low_x * low_x + high_x * high_x
            low_x *= tl.load(gain + low_k, mask=low_k < K, other=0.0).to(tl.float32)
            high_x *= tl.load(gain + low_k + 64, mask=low_k + 64 < K, other=0.0).to(tl.float32)
        low_group = tl.minimum(column // GROUP, GROUPS - 1)
        high_group = tl.minimum((column + 64) // GROUP, GROUPS - 1)
        low_sums, high_sums = tl.sum(low_x, 1), tl.sum(high_x, 1)
        places = first[None, :, None] + tl.arange(0, J)[None, None, :]
        inside = places < ROW_BYTES
        w = tl.load(w_rows + places, mask=inside, other=0)
        sums += _products(
            w, low_x, high_x, low_sums, high_sums, rows, low_group, high_group, scales, zeros, GROUPS, GROUP,
            HAS_ZEROS,
        )  # fmt: skip
        if EPILOGUE >= 2:
            w = tl.load(w_rows + N.to(tl.int64) * ROW_BYTES + places, mask=inside, other=0)
            ups += _products(
                w, low_x, high_x, low_sums, high_sums, rows + N, low_group, high_group, scales, zeros, GROUPS,
                GROUP, HAS_ZEROS,
            )  # fmt: skip
    total = tl.sum(sums, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
        total *= scale
    if HAS_BIAS:
        total += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
    if EPILOGUE == 1:
        total += tl.load(out + n, mask=kept, other=0.0).to(tl.float32)
    if EPILOGUE >= 2:
        up = tl.sum(ups, 1) * scale
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=kept, other=0.0).to(tl.float32)
        total = gated(total, up, out.dtype.element_ty, EPILOGUE)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=kept)


def int4_gemv_fits(weight_format: WeightFormat) -> bool:
    """Whether the kernel is for this format: int4 by groups of 32 columns, or of a multiple of 64."""
    group = weight_format.scale_columns
    return weight_format.codes == "int4" and (group in (0, 32) or group % _HALF_SPAN == 0)


def int4_gemv(
    out: Tensor,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    norm: Norm | None,
    tuning: GemvTuning,
) -> None:
    """x [1, K], weight [N, K] (gated: [2 N, K]) of a format that `int4_gemv_fits`, out [1, N]; raises
    ValueError for others. `tuning.width`: columns, 128 at least."""
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    k, weight_format = weight.columns, weight.format
    if tuple(x.shape) != (1, k) or tuple(out.shape) != (1, n) or not int4_gemv_fits(weight_format):
        raise ValueError(
            f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {weight_format.name} {weight.shape}"
        )
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.codes.is_contiguous():
        raise ValueError("rows must be contiguous")
    group = weight_format.scale_columns or weight.codes[0].numel() * 2
    piece = min(_HALF_SPAN, group)
    _int4_gemv[(triton.cdiv(n, tuning.rows),)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        x if norm is None else norm.gain,
        out,
        0.0 if norm is None else norm.eps,
        n,
        k,
        weight.codes[0].numel(),
        weight.scales.shape[1],
        BN=tuning.rows,
        S=max(1, tuning.width // 2 // piece),
        J=piece,
        GROUP=group,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_ZEROS=weight.zeros is not None,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
    )
