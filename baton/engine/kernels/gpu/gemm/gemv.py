"""One row times a weight matrix: each program streams some of its rows, nothing is reused but x.

    out = x · Wᵀ + bias                         PLAIN
    out = out + x · Wᵀ + bias                   RESIDUAL
    out = silu(x · Gateᵀ) · (x · Upᵀ)           SWIGLU, W = [Gate; Up]; GEGLU with gelu

with x optionally normed first: x · gain / sqrt(mean(x²) + eps). The mean is gathered while x streams by,
and scales the sums at the end. Sums are float32. W is as it is, or fp8 or int8 codes with a scale a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight


@triton.jit
def gated(gate, up, dtype: tl.constexpr, EPILOGUE: tl.constexpr):
    """SwiGLU or GEGLU of float32 sums: each rounded to the dtype first, as if the product had been stored."""
    g = gate.to(dtype).to(tl.float32)
    z = g
    if EPILOGUE == 3:  # (1 + tanh(z / 2)) / 2 is the logistic function of z
        z = tl.maximum(1.5957691216057308 * (g + 0.044715 * g * g * g), -80.0)
    return (g / (1.0 + tl.exp(-z))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    gain,
    scales,
    out,
    eps,
    N,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = n < N
    rows = weight + tl.where(kept, n, 0).to(tl.int64)[:, None] * K
    k = tl.arange(0, BK)
    first = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)
    xs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    squares = xs * xs
    if HAS_NORM:
        xs *= tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    sums = first.to(tl.float32) * xs[None, :]
    if EPILOGUE >= 2:
        up_rows = rows + N.to(tl.int64) * K
        ups = tl.load(up_rows + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32) * xs[None, :]
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        if EVEN:
            xs = tl.load(x + k).to(tl.float32)
            w = tl.load(rows + k[None, :]).to(tl.float32)
        else:
            xs = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            w = tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += xs * xs
            xs *= tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
        sums += w * xs[None, :]
        if EPILOGUE >= 2:
            if EVEN:
                ups += tl.load(up_rows + k[None, :]).to(tl.float32) * xs[None, :]
            else:
                u = tl.load(up_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
                ups += u.to(tl.float32) * xs[None, :]
    total = tl.sum(sums, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        total *= scale
    if HAS_SCALES:
        total *= tl.load(scales + n, mask=kept, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
    if EPILOGUE == 1:
        total += tl.load(out + n, mask=kept, other=0.0).to(tl.float32)
    if EPILOGUE >= 2:
        up = tl.sum(ups, 1) * scale
        if HAS_SCALES:
            up *= tl.load(scales + N + n, mask=kept, other=0.0)
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=kept, other=0.0).to(tl.float32)
        total = gated(total, up, out.dtype.element_ty, EPILOGUE)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=kept)


@dataclass(frozen=True, slots=True)
class GemvTuning:
    """Rows of W a program takes, and how it walks along them; `stages` > 1: loads run ahead through shared
    memory."""

    rows: int = 8
    width: int = 512
    warps: int = 4
    stages: int = 1


def gemv(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.PLAIN,
    norm: Norm | None = None,
    tuning: GemvTuning = GemvTuning(),
) -> None:
    """Multiplies one row: x [1, K], weight [N, K] (gated: [2 N, K]), out [1, N]; raises ValueError for other
    shapes, and for codes without a scale a row."""
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    k = weight.shape[1]
    if tuple(x.shape) != (1, k) or tuple(out.shape) != (1, n):
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {tuple(weight.shape)}")
    matrix = weight.codes if isinstance(weight, QuantizedWeight) else weight
    scales = weight.scales if isinstance(weight, QuantizedWeight) else None
    if scales is not None and scales.shape != (weight.shape[0], 1):
        raise ValueError(f"scales {tuple(scales.shape)} of {weight.shape[0]} rows")
    if matrix.stride() != (k, 1) or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    _gemv[(triton.cdiv(n, tuning.rows),)](
        x,
        matrix,
        x if bias is None else bias,
        x if norm is None else norm.gain,
        x if scales is None else scales,
        out,
        0.0 if norm is None else norm.eps,
        n,
        k,
        BN=tuning.rows,
        BK=tuning.width,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_SCALES=scales is not None,
        EVEN=k % tuning.width == 0,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
    )
