"""Quantisation of rows to 8 bits with a scale each, and back; see `kvtransfer.device.quantise`.

Rounds on the bits of float32, so that the result is to nearest even on every GPU generation and in Triton's
interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit
def _to_e4m3(value):
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
def _from_e4m3(code):
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    # Sets the sign bit: Triton's negation is 0 - size, which has no negative zero.
    bits = size.to(tl.uint32, bitcast=True) | ((code & 0x80).to(tl.uint32) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits_of(value, BFLOAT: tl.constexpr):
    """The bits of bfloat16 or float16, in int16."""
    if BFLOAT:
        wide = value.to(tl.uint32, bitcast=True)
        return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(tl.int16)
    return value.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _quantise(source, codes, scales, rows, dim, FLOAT: tl.constexpr, LIMIT: tl.constexpr,
              ROWS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    at = row[:, None] * dim + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < dim)
    values = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    scale = tl.where(largest > 0.0, tl.div_rn(largest, tl.full([ROWS], LIMIT, tl.float32)), 1.0)
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, DIM]))
    if FLOAT:
        code = _to_e4m3(scaled)
    else:
        # Beyond 2^23 a float32 has no fraction left: the sum is rounded to nearest even.
        code = (scaled + 12582912.0) - 12582912.0
        code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int32) & 0xFF
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _restore(codes, scales, target, rows, dim, FLOAT: tl.constexpr, BFLOAT: tl.constexpr,
             ROWS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    at = row[:, None] * dim + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < dim)
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=row < rows, other=1.0)
    value = tl.where(code >= 128, code - 256, code).to(tl.float32)
    if FLOAT:
        value = _from_e4m3(code)
    value *= scale[:, None]
    if target.dtype.element_ty == tl.float32:
        tl.store(target + at, value, mask=inside)
    else:
        tl.store(target + at, _bits_of(value, BFLOAT), mask=inside)


def quantise(source: Tensor, codes: Tensor, scales: Tensor, *, is_float: bool, limit: float) -> None:
    """Enqueues source [rows, dim], a float dtype of up to 32 bits → codes uint8 [rows, dim], scales float32
    [rows]."""
    rows, dim = source.shape
    _quantise[(triton.cdiv(rows, _ROWS),)](
        source, codes, scales, rows, dim,
        FLOAT=is_float, LIMIT=limit, ROWS=_ROWS, DIM=triton.next_power_of_2(dim),
    )  # fmt: skip


def restore(codes: Tensor, scales: Tensor, target: Tensor, *, is_float: bool, bfloat: bool) -> None:
    """Enqueues the inverse; target [rows, dim]: float32, or int16 for the bits of bfloat16 or float16."""
    rows, dim = codes.shape
    _restore[(triton.cdiv(rows, _ROWS),)](
        codes, scales, target, rows, dim,
        FLOAT=is_float, BFLOAT=bfloat, ROWS=_ROWS, DIM=triton.next_power_of_2(dim),
    )  # fmt: skip
