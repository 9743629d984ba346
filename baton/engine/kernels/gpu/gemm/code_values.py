"""Codes of a quantised weight as numbers, in registers.

A GPU converts integers and e4m3 slowly, and to bfloat16 in several steps. Here bits are moved, four codes at
once:

    e4m3    its exponent and mantissa are those of a bfloat16 that is 2^120 times smaller
    int8    (128 + low 7 bits) - (128 or, by the sign, 256), whose bits are those of the code beside 0x43
    int4    128 + code, whose bits are those of the code beside 0x43; zeros are subtracted afterwards
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import ON_CHIP

FP8 = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
KINDS = {"fp8": 0, "int8": 1, "int4": 2}

# The bytes 0, b0, 0, b1 and 0, b2, 0, b3; then sign, exponent and mantissa to their places, times 2^120.
_FP8_ASM = tl.constexpr("""
{
.reg .b32 a, b, s, t, scale;
mov.b32 scale, 0x7b807b80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 4;
shr.u32 t, b, 4;
and.b32 s, s, 0x07f007f0;
and.b32 t, t, 0x07f007f0;
lop3.b32 a, a, 0x80008000, s, 0xea;
lop3.b32 b, b, 0x80008000, t, 0xea;
mul.rn.bf16x2 $0, a, scale;
mul.rn.bf16x2 $1, b, scale;
}
""")
_INT8_ASM = tl.constexpr("""
{
.reg .b32 a, b, s, t;
prmt.b32 a, $2, 0x43434343, 0x4140;
prmt.b32 b, $2, 0x43434343, 0x4342;
and.b32 s, a, 0xff80ff80;
and.b32 t, b, 0xff80ff80;
and.b32 a, a, 0xff7fff7f;
and.b32 b, b, 0xff7fff7f;
sub.rn.bf16x2 $0, a, s;
sub.rn.bf16x2 $1, b, t;
}
""")
_INT4_ASM = tl.constexpr("""
{
.reg .b32 a, b;
and.b32 a, $4, 0x0f0f0f0f;
shr.u32 b, $4, 4;
and.b32 b, b, 0x0f0f0f0f;
prmt.b32 $0, a, 0x43434343, 0x4140;
prmt.b32 $1, a, 0x43434343, 0x4342;
prmt.b32 $2, b, 0x43434343, 0x4140;
prmt.b32 $3, b, 0x43434343, 0x4342;
}
""")


@triton.jit
def code_values(codes, KIND: tl.constexpr, dtype: tl.constexpr):
    """e4m3 or int8 codes as numbers of `dtype`."""
    if ON_CHIP and dtype == tl.bfloat16:
        raw = codes.to(tl.uint8, bitcast=True)
        if KIND == FP8:
            return tl.inline_asm_elementwise(
                _FP8_ASM, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                _INT8_ASM, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    else:
        return codes.to(dtype)


@triton.jit
def int4_values(codes, low_zero, high_zero, dtype: tl.constexpr):
    """Bytes of two codes each → the low codes less their zeros, and the high ones less theirs, of `dtype`.
    Zeros are float32, of a shape that fits the bytes'."""
    if ON_CHIP and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _INT4_ASM,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low - (low_zero + 128).to(tl.bfloat16), high - (high_zero + 128).to(tl.bfloat16)
    else:
        low = (codes & 15).to(tl.float32) - low_zero
        high = (codes >> 4).to(tl.float32) - high_zero
        return low.to(dtype), high.to(dtype)
