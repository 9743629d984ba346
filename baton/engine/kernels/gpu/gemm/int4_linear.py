"""A few rows times a weight matrix of int4 on the matrix units for integers.

    out = epilogue(x · Wᵀ + bias), the epilogues of `skinny_linear`

To make a bfloat16 of a code of 4 bits takes more instructions than there is time for while W streams by. An
integer of 8 bits is the code in the upper half of a byte: one or two instructions for four codes. So x
becomes integers too, of two digits (`quantize_digits`), and each tile of W is multiplied by both:

    Σ x · w = scale of x · scale of w / 16 · (128 · Σ high · 16 code + Σ low · 16 code)

Sums over 128 columns are exact; they are scaled and added up in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import ON_CHIP
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, finish_tile, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat

_HALF_SPAN = tl.constexpr(INT4_SPAN // 2)
# Four low codes and four high ones to the upper halves of bytes, less 8.
_UPPER_HALVES = tl.constexpr("""
{
.reg .b32 a;
shl.b32 a, $2, 4;
lop3.b32 $0, a, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a;
}
""")


@triton.jit
def _upper_halves(codes):
    """Bytes of two codes each → 16 · (low code - 8) and 16 · (high code - 8), int8."""
    if ON_CHIP:
        low, high = tl.inline_asm_elementwise(
            _UPPER_HALVES, "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low = (((codes & 15) << 4) ^ 0x80).to(tl.int8, bitcast=True)
        high = ((codes & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def _digits(x_rows, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x_rows + k[:, None])
    else:
        return tl.load(x_rows + k[:, None], mask=(k < K)[:, None], other=0)


@triton.jit
def _joined(products, BN: tl.constexpr, BM: tl.constexpr):
    """Products [BN, 2 · BM] with the high digits, then with the low ones → [BN, BM] float32."""
    first, second = tl.split(tl.permute(tl.reshape(products, (BN, 2, BM)), (0, 2, 1)))
    return (first * 128 + second).to(tl.float32)


@triton.jit
def _span(codes, scales, zeros, x_rows, rows, start, sums, K, GROUPS, BN: tl.constexpr, BM: tl.constexpr,
          GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Adds the products of 128 columns to `sums` [BN, BM], all but the scale of x. `codes`: pointers to the
    rows' codes [BN, 1], `x_rows` to the digits [1, 2 · BM], high ones first; `rows`: the numbers of the rows
    [BN]."""
    WIDTH: tl.constexpr = GROUP if GROUP < _HALF_SPAN else _HALF_SPAN
    for part in tl.static_range(_HALF_SPAN // WIDTH):
        inside = tl.arange(0, WIDTH) + part * WIDTH
        low_k = inside + start
        high_k = low_k + _HALF_SPAN
        taken = tl.load(codes + (inside + start // 2)[None, :])
        low_group = rows * GROUPS + tl.minimum((start + part * WIDTH) // GROUP, GROUPS - 1)
        high_group = rows * GROUPS + tl.minimum((start + part * WIDTH + _HALF_SPAN) // GROUP, GROUPS - 1)
        if HAS_ZEROS:
            low_zero = tl.load(zeros + low_group).to(tl.int8)[:, None]
            high_zero = tl.load(zeros + high_group).to(tl.int8)[:, None]
            low = ((taken & 15).to(tl.int8) - low_zero) * 8
            high = ((taken >> 4).to(tl.int8) - high_zero) * 8
        else:
            low, high = _upper_halves(taken)
        # Both digits are columns of one product: the units are waited for half as often.
        products = tl.dot(low, _digits(x_rows, low_k, K, EVEN), out_dtype=tl.int32)
        scale = tl.load(scales + low_group)[:, None]
        if GROUP % 128 != 0:
            sums += _joined(products, BN, BM) * scale
            products = tl.zeros((BN, 2 * BM), tl.int32)
            scale = tl.load(scales + high_group)[:, None]
        products = tl.dot(high, _digits(x_rows, high_k, K, EVEN), products, out_dtype=tl.int32)
        sums += _joined(products, BN, BM) * scale
    return sums


@triton.jit(do_not_specialize=["M"])
def _int4_skinny(
    x, x_scales, codes, scales, zeros, bias, out, partial, arrived, low_digit, M, N, K, ROW_BYTES, GROUPS,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, SPAN: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows_tile = tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    m = rows_tile * BM + tl.arange(0, BM)
    # Rows past the end are read from the last, and never stored: no mask on the way.
    rows = tl.minimum(n, N - 1)
    m_safe = tl.minimum(m, M - 1)
    w_rows = codes + rows.to(tl.int64)[:, None] * ROW_BYTES
    both = tl.arange(0, 2 * BM)
    digit_rows = tl.minimum(rows_tile * BM + both % BM, M - 1) * K + both // BM * low_digit
    x_rows = x + digit_rows[None, :]
    per_split = tl.cdiv(tl.cdiv(K, SPAN), SPLITS) * SPAN
    begin = split * per_split
    sums = tl.zeros((BN, BM), tl.float32)
    ups = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + per_split, K), SPAN, num_stages=STAGES):
        sums = _span(
            w_rows, scales, zeros, x_rows, rows, start, sums, K, GROUPS, BN, BM, GROUP, HAS_ZEROS, EVEN
        )
        if EPILOGUE >= 2:
            u_rows = w_rows + N.to(tl.int64) * ROW_BYTES
            ups = _span(
                u_rows, scales, zeros, x_rows, rows + N, start, ups, K, GROUPS, BN, BM, GROUP, HAS_ZEROS, EVEN
            )
    x_scale = tl.load(x_scales + m_safe)[None, :] * (0.125 if HAS_ZEROS else 0.0625)
    sums *= x_scale
    ups *= x_scale
    finish_tile(
        sums, ups, bias, out, partial, arrived, n, m, tile, rows_tile, split, M, N, BM, BN, SPLITS, EPILOGUE,
        HAS_BIAS,
    )  # fmt: skip


def int4_by_digits(weight_format: WeightFormat) -> bool:
    """True if the kernel is for this format: int4 by groups of 32 columns, or of a multiple of 64."""
    group = weight_format.scale_columns
    return weight_format.codes == "int4" and (group in (0, 32) or group % (INT4_SPAN // 2) == 0)


def int4_linear(
    out: Tensor,
    digits: Tensor,
    x_scales: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    tuning: SkinnyTuning,
    space: SplitSpace | None = None,
) -> None:
    """Multiplies digits by int4: x as digits [2, M, K] int8 with scales [M], weight [N, K] (gated: [2 N, K])
    of a format that `int4_by_digits`, out [M, N], contiguous. With splits, `space` holds at least
    `split_space_needed`. Raises ValueError for what does not fit; `tuning.width` is not used."""
    n = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
    (_, m, k), weight_format = digits.shape, weight.format
    if (
        weight.shape[1] != k
        or tuple(out.shape) != (m, n)
        or x_scales.shape != (m,)
        or not int4_by_digits(weight_format)
    ):
        raise ValueError(
            f"digits {tuple(digits.shape)}, out {tuple(out.shape)} do not fit "
            f"{weight_format.name} {weight.shape}"
        )
    if not (digits.is_contiguous() and out.is_contiguous() and weight.codes.is_contiguous()):
        raise ValueError("digits, weight and out must be contiguous")
    elements, tiles = split_space_needed(m, n, tuning, epilogue)
    if tiles and (space is None or not space.holds(elements, tiles)):
        raise ValueError(f"{tuning.splits} splits need a space of {elements} elements and {tiles} tiles")
    _int4_skinny[(triton.cdiv(n, tuning.columns), tuning.splits, triton.cdiv(m, tuning.rows))](
        digits,
        x_scales,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias,
        out,
        out if space is None else space.partial,
        out if space is None else space.arrived,
        m * k,
        m,
        n,
        k,
        weight.codes[0].numel(),
        weight.scales.shape[1],
        BM=tuning.rows,
        BN=tuning.columns,
        SPLITS=tuning.splits,
        STAGES=tuning.stages,
        SPAN=INT4_SPAN,
        EPILOGUE=int(epilogue),
        HAS_BIAS=bias is not None,
        HAS_ZEROS=weight.zeros is not None,
        EVEN=k % INT4_SPAN == 0,
        GROUP=weight_format.scale_columns or weight.codes[0].numel() * 2,
        num_warps=tuning.warps,
    )
