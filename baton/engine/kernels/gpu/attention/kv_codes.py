"""Keys and values in e4m3 with a scale for each token and head, in registers; the same bits as
`baton.engine.kernels.reference.kv_codes`."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.e4m3 import from_e4m3, to_e4m3
from baton.device.ptx import ON_CHIP
from baton.engine.kernels.gpu.attention.softmax_step import softmax_weights

_LIMIT = tl.constexpr(448.0)


@triton.jit
def scales_of(largest):
    """The scales of vectors from their largest magnitudes, float32: rounded to bfloat16."""
    bits = tl.div_rn(largest, tl.full(largest.shape, _LIMIT, tl.float32)).to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(rounded > 0.0, rounded, 1.0)


@triton.jit
def _quotients(x, scales):
    """x [rows, dim] float32 over `scales` [rows], rounded to nearest.

    A GPU divides by multiplying with the reciprocal and correcting by the remainder, which is exact here
    (Markstein, 1990: the quotient is at most two units of its last place off before): a scale has eight bits.
    Scales are kept away from numbers whose reciprocal is infinite. A division takes 20 instructions.
    """
    if ON_CHIP:
        factor = tl.where(scales < 2.0**-60, 2.0**64, 1.0)
        scales *= factor
        inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)[:, None]
        x *= factor[:, None]
        quotient = x * inverse
        rest = tl.fma(-quotient, tl.broadcast_to(scales[:, None], x.shape), x)
        return tl.fma(rest, tl.broadcast_to(inverse, x.shape), quotient)
    else:
        return tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))


@triton.jit
def codes_of(x, scales):
    """x [rows, dim] float32 with `scales` [rows] → the codes, float8_e4m3fn, and the numbers that they are,
    exact in float32: times its scale, what a code stands for.

    By integers: where a kernel has the GPU convert numbers to codes and these back again, the assembler of
    CUDA 12.8, which Triton 3.6 brings, reads registers that were never written (half of a prompt's keys and
    values were of no meaning; that of CUDA 12.9 does not).
    """
    codes = to_e4m3(_quotients(x, scales))
    return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True), from_e4m3(codes)


@triton.jit
def packed(k_scales, v_scales):
    """The scales of K and V as the cache has them: two bfloat16 in an int32."""
    low = k_scales.to(tl.uint32, bitcast=True) >> 16
    return (low | v_scales.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def unpacked(pairs):
    """Inverse of `packed` → the scales of K and of V, float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def codes_weights(scores, v_scales, highest):
    """A tile's part in a running softmax over codes of values, see `softmax_weights`.

    scores [queries, keys] in powers of two; v_scales [keys] float32, positive → the highest so far, what sums
    so far are multiplied by, the weights of the codes, and what the tile adds to the sums of exponentials.

    A scale is 2^e · f, and e is added to the scores: so weights stay below 2, as float16 needs it, whatever
    the scales are. Those below 2^-100 count as if they were larger: their values are as good as zero.
    """
    bits = v_scales.to(tl.int32, bitcast=True)
    exponents = tl.maximum(bits >> 23, 27)
    fractions = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    inverses = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    scores += (exponents - 127).to(tl.float32)[None, :]
    higher, fade, weights = softmax_weights(scores, highest)
    return higher, fade, weights * fractions[None, :], tl.sum(weights * inverses[None, :], 1)


@triton.jit
def even_odd(pairs, dtype: tl.constexpr):
    """Two codes in each int16 → the values of the lower ones and of the upper ones, in `dtype`.

    A GPU's matrix instructions take values of two tokens from one register. Loads from shared memory can
    arrange 16-bit elements so, but not bytes: hence pairs of dimensions.
    """
    if ON_CHIP and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        codes = pairs.to(tl.int32)
        return from_e4m3(codes & 0xFF).to(dtype), from_e4m3((codes >> 8) & 0xFF).to(dtype)
