"""Conversion to and from e4m3 on the bits of float32, for kernels: to nearest even on every GPU generation,
and in Triton's interpreter, whose own conversion loses a carry."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_e4m3(value):
    """The e4m3 codes of values with |value| ≤ 448, in int32."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the steps are 2^-9: those of a float32 between 2^14 and 2^15.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    return (sign | tl.where(size < 0.015625, small, normal)).to(tl.int32)


@triton.jit
def from_e4m3(code):
    """The values of codes in int32, NaN excepted, in float32."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    # Sets the sign bit: Triton's negation is 0 - size, which has no negative zero.
    bits = size.to(tl.uint32, bitcast=True) | ((code & 0x80).to(tl.uint32) << 24)
    return bits.to(tl.float32, bitcast=True)
