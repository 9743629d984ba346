"""One row times a weight matrix of int4: `gemv` for codes of 4 bits.

    x · W[n] = Σ over groups of scale[n, group] · (Σ x · code - zero[n, group] · Σ x)

There is time for about four instructions a code. So codes are not converted: a word of eight is shifted, and
each code is masked and joined to an exponent, by which it is the float32 128 + code, or 128 + code / 16 with
x times 16. What is too much leaves with the zero, through the sum of x: products begin at minus that. Norms
and epilogues are those of `gemv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gated
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat

_HALF_SPAN = INT4_SPAN // 2
# The mask of a code at bit 16, and the bits of 128 as float32. Arguments, since as constants each use would
# take a move.
_MASK, _EXPONENT = 0x000F0000, 0x43000000


@triton.jit
def _four(x, quad, K, QUADS: tl.constexpr, EVEN: tl.constexpr):
    """Columns 4 · quad to 4 · quad + 3 of x, float32; zeros from column K on. QUADS: x is bfloat16 and K a
    multiple of 4, so that one load takes all four."""
    if QUADS:
        places = x.to(tl.pointer_type(tl.int64)) + quad
        taken = tl.load(places) if EVEN else tl.load(places, mask=quad < K // 4, other=0)
        first, last = taken.to(tl.int32), (taken >> 32).to(tl.int32)
        a, b = (first << 16).to(tl.float32, bitcast=True), (first & -65536).to(tl.float32, bitcast=True)
        c, d = (last << 16).to(tl.float32, bitcast=True), (last & -65536).to(tl.float32, bitcast=True)
    else:
        k = quad * 4
        a = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        b = tl.load(x + k + 1, mask=k + 1 < K, other=0.0).to(tl.float32)
        c = tl.load(x + k + 2, mask=k + 2 < K, other=0.0).to(tl.float32)
        d = tl.load(x + k + 3, mask=k + 3 < K, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _above_128(word, mask, exponent):
    """The code at bits 16 or 12, by the mask, as 128 + code, or 128 + code / 16."""
    return ((word & mask) | exponent).to(tl.float32, bitcast=True)


@triton.jit
def _word(words, lows, highs, low, high, mask, exponent):
    """Adds eight codes times x: low halves of bytes times four of x to `lows`, high ones times four of x
    times 16 to `highs`."""
    up, down, turned = words << 8, words >> 8, (words << 16) | ((words >> 16) & 0xFFFF)
    lows += _above_128(turned, mask, exponent) * low[0][None, :]
    lows += _above_128(up, mask, exponent) * low[1][None, :]
    lows += _above_128(words, mask, exponent) * low[2][None, :]
    lows += _above_128(down, mask, exponent) * low[3][None, :]
    highs += _above_128(up, mask >> 4, exponent) * high[0][None, :]
    highs += _above_128(words, mask >> 4, exponent) * high[1][None, :]
    highs += _above_128(down, mask >> 4, exponent) * high[2][None, :]
    highs += _above_128(turned, mask >> 4, exponent) * high[3][None, :]
    return lows, highs


@triton.jit
def _products(pairs, x, low_sums, high_sums, scales, zeros, low_group, high_group, mask, exponent,
              GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):  # fmt: skip
    """Pairs of words [BN, W] times x → [BN, W], scaled. `x`: fours [W] for the low halves of the first and of
    the second words' bytes, and so, times 16, for the high ones; `low_sums`, `high_sums` [W] of x. `scales`,
    `zeros`: pointers to the rows' [BN, 1]."""
    if HAS_ZEROS:
        low_zero = tl.load(zeros + low_group[None, :]).to(tl.float32)
        high_zero = tl.load(zeros + high_group[None, :]).to(tl.float32)
    else:
        low_zero = 8.0
        high_zero = 8.0
    lows = low_sums[None, :] * (-128.0 - low_zero)
    highs = high_sums[None, :] * (-2048.0 - high_zero)
    lows, highs = _word(pairs.to(tl.int32), lows, highs, x[0], x[2], mask, exponent)
    lows, highs = _word((pairs >> 32).to(tl.int32), lows, highs, x[1], x[3], mask, exponent)
    low_scale = tl.load(scales + low_group[None, :])
    if GROUP % 128 == 0:
        return (lows + highs) * low_scale
    else:
        return lows * low_scale + highs * tl.load(scales + high_group[None, :])


@triton.jit
def _scaled(four, by):
    return four[0] * by[0], four[1] * by[1], four[2] * by[2], four[3] * by[3]


@triton.jit
def _sum(four):
    return four[0] + four[1] + four[2] + four[3]


# `row_pairs`: pairs of words of a row, not known to be even: so a thread takes one pair, as it takes one four
# of x, and what meets lies in one thread.
@triton.jit(do_not_specialize=["row_pairs"])
def _int4_gemv(
    x, codes, scales, zeros, bias, gain, out, eps, N, K, row_pairs, GROUPS, mask, exponent,
    BN: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ZEROS: tl.constexpr, STAGES: tl.constexpr,
    QUADS: tl.constexpr, GAIN_QUADS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = n < N
    rows = tl.where(kept, n, 0)[:, None]
    w_rows = codes.to(tl.pointer_type(tl.int64)) + rows.to(tl.int64) * row_pairs
    up_rows = w_rows + N.to(tl.int64) * row_pairs
    sums = tl.zeros((BN, W), tl.float32)
    ups = tl.zeros((BN, W), tl.float32)
    squares = tl.zeros((W,), tl.float32)
    for start in tl.range(0, row_pairs, W, num_stages=STAGES):
        pair = start + tl.arange(0, W)
        quad = pair // 8 * 32 + pair % 8 * 2
        la, lb = _four(x, quad, K, QUADS, EVEN), _four(x, quad + 1, K, QUADS, EVEN)
        ha, hb = _four(x, quad + 16, K, QUADS, EVEN), _four(x, quad + 17, K, QUADS, EVEN)
        if HAS_NORM:
            squares += _sum(_scaled(la, la)) + _sum(_scaled(lb, lb))
            squares += _sum(_scaled(ha, ha)) + _sum(_scaled(hb, hb))
            la = _scaled(la, _four(gain, quad, K, GAIN_QUADS, EVEN))
            lb = _scaled(lb, _four(gain, quad + 1, K, GAIN_QUADS, EVEN))
            ha = _scaled(ha, _four(gain, quad + 16, K, GAIN_QUADS, EVEN))
            hb = _scaled(hb, _four(gain, quad + 17, K, GAIN_QUADS, EVEN))
        low_sums, high_sums = _sum(la) + _sum(lb), _sum(ha) + _sum(hb)
        times = (16.0, 16.0, 16.0, 16.0)
        xs = (la, lb, _scaled(ha, times), _scaled(hb, times))
        low_group, high_group = quad * 4 // GROUP, (quad * 4 + 64) // GROUP
        if not EVEN:
            low_group, high_group = tl.minimum(low_group, GROUPS - 1), tl.minimum(high_group, GROUPS - 1)
        inside = (pair < row_pairs)[None, :]
        place = pair[None, :]
        w = tl.load(w_rows + place) if EVEN else tl.load(w_rows + place, mask=inside, other=0)
        sums += _products(
            w, xs, low_sums, high_sums, scales + rows * GROUPS, zeros + rows * GROUPS, low_group, high_group,
            mask, exponent, GROUP, HAS_ZEROS,
        )  # fmt: skip
        if EPILOGUE >= 2:
            w = tl.load(up_rows + place) if EVEN else tl.load(up_rows + place, mask=inside, other=0)
            ups += _products(
                w, xs, low_sums, high_sums, scales + (rows + N) * GROUPS, zeros + (rows + N) * GROUPS,
                low_group, high_group, mask, exponent, GROUP, HAS_ZEROS,
            )  # fmt: skip
    total = tl.sum(sums, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
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
    """True if the kernel is for this format: int4 by groups of 32 columns, or of a multiple of 64."""
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
    """Multiplies one row by int4: x [1, K], weight [N, K] (gated: [2 N, K]) of a format that
    `int4_gemv_fits`, out [1, N]; raises ValueError for others. `tuning.width`: columns, 128 at least."""
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    k, weight_format = weight.columns, weight.format
    if tuple(x.shape) != (1, k) or tuple(out.shape) != (1, n) or not int4_gemv_fits(weight_format):
        raise ValueError(
            f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit {weight_format.name} {weight.shape}"
        )
    if x.stride(1) != 1 or out.stride(1) != 1 or not weight.codes.is_contiguous():
        raise ValueError("rows must be contiguous")
    group = weight_format.scale_columns or weight.codes[0].numel() * 2
    pairs, at_once = weight.codes[0].numel() // 8, max(INT4_SPAN, tuning.width) // 16
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
        pairs,
        weight.scales.shape[1],
        _MASK,
        _EXPONENT,
        BN=tuning.rows,
        W=at_once,
        GROUP=group,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_ZEROS=weight.zeros is not None,
        STAGES=tuning.stages,
        QUADS=_by_fours(x, k),
        GAIN_QUADS=norm is not None and _by_fours(norm.gain, k),
        EVEN=pairs % at_once == 0 and k % INT4_SPAN == 0,
        num_warps=tuning.warps,
    )


def _by_fours(x: Tensor, k: int) -> bool:
    return x.dtype == torch.bfloat16 and k % 4 == 0 and x.data_ptr() % 8 == 0
