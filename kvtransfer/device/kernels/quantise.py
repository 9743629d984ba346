"""Quantisation of rows to 8 bits with a scale each, and back; see `kvtransfer.device.quantise`.

Rounds on the bits of float32, so that the result is to nearest even on every GPU generation and in Triton's
interpreter (`baton.device.e4m3`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.e4m3 import from_e4m3, to_e4m3

_ROWS = 16


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
        code = to_e4m3(scaled)
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
        value = from_e4m3(code)
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
