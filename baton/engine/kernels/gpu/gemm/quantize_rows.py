"""Rows of activations → codes of 8 bits with a scale a row, a program a row; what makes the rows, a norm or a
gated activation, is part of it where it can be.

    scale = max |row| / most        code = row / scale, rounded to e4m3 or to an integer

Or two digits of 8 bits stand for an element, 128 · high + low with low from -64 to 63: about as fine as
bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import dependent_launch, let_next_begin, wait_for_previous
from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import gated

# The largest number of two digits: 128 · 127 + 63.
_MOST_DIGITS = 16319.0
MOST_E4M3 = tl.constexpr(448.0)
_MOST = {torch.float8_e4m3fn: MOST_E4M3.value, torch.int8: 127.0}
# Rows wider than this have more threads; narrow ones, which are many where they are an expert's, have few.
_WIDE, _NARROW = 8192, 1024


@triton.jit
def store_codes(values, codes, scales, row, i, WIDTH: tl.constexpr, MOST: tl.constexpr):
    """Stores a row's values [columns i] float32 as codes, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-30) / MOST
    units = values / scale
    if codes.dtype.element_ty == tl.int8:
        units = tl.floor(units + 0.5)
    tl.store(codes + row * WIDTH + i, units.to(codes.dtype.element_ty), mask=i < WIDTH)
    tl.store(scales + row, scale)


@triton.jit
def _quantize(
    x, gain, present, codes, scales, eps,
    WIDTH: tl.constexpr, WIDTH_POWER: tl.constexpr, HAS_NORM: tl.constexpr, HAS_PRESENT: tl.constexpr,
    DIGITS: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_previous()
    else:
        let_next_begin()
    row = tl.program_id(0).to(tl.int64)
    if HAS_PRESENT:
        there = tl.load(present + row) >= 0
        if not there:
            return
    i = tl.arange(0, WIDTH_POWER)
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    if HAS_NORM:
        gains = tl.load(gain + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
        if gain.dtype.element_ty == dtype:
            values = values.to(dtype).to(tl.float32)
        values = (values * gains).to(dtype).to(tl.float32)
    if DIGITS:
        scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-30) / MOST
        number = tl.floor(values / scale + 0.5).to(tl.int32)
        high = (number + 64) >> 7
        low = number - high * 128
        behind = tl.num_programs(0).to(tl.int64) * WIDTH
        tl.store(codes + row * WIDTH + i, high.to(tl.int8), mask=i < WIDTH)
        tl.store(codes + behind + row * WIDTH + i, low.to(tl.int8), mask=i < WIDTH)
        tl.store(scales + row, scale)
    else:
        store_codes(values, codes, scales, row, i, WIDTH, MOST)


@triton.jit
def _gated_row(gate_up, x_scales, w_scales, row, i, WIDTH: tl.constexpr, EPILOGUE: tl.constexpr,
               HAS_SCALES: tl.constexpr):  # fmt: skip
    """Columns i of a row of [gate, up] → their gated activation, rounded to the dtype of gate_up, float32."""
    inside = i < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALES:
        x_scale = tl.load(x_scales + row)
        gate *= x_scale * tl.load(w_scales + i, mask=inside, other=0.0)
        up *= x_scale * tl.load(w_scales + WIDTH + i, mask=inside, other=0.0)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    return gated(gate, up, dtype, EPILOGUE).to(dtype).to(tl.float32)


@triton.jit
def _quantize_gated(
    gate_up, x_scales, w_scales, codes, scales,
    WIDTH: tl.constexpr, WIDTH_POWER: tl.constexpr, EPILOGUE: tl.constexpr, HAS_SCALES: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    let_next_begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH_POWER)
    values = _gated_row(gate_up, x_scales, w_scales, row, i, WIDTH, EPILOGUE, HAS_SCALES)
    store_codes(values, codes, scales, row, i, WIDTH, MOST)


@triton.jit
def _scale(
    sums, x_scales, w_scales, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    let_next_begin()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    if EPILOGUE >= 2:
        values = _gated_row(sums, x_scales, w_scales, row, i, WIDTH, EPILOGUE, True)
    else:
        values = tl.load(sums + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        values *= tl.load(x_scales + row) * tl.load(w_scales + i, mask=inside, other=0.0)
        if EPILOGUE == 1:
            values += tl.load(out + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, values.to(out.dtype.element_ty), mask=inside)


def quantize_rows(
    codes: Tensor,
    scales: Tensor,
    x: Tensor,
    norm: Norm | None = None,
    present: Tensor | None = None,
    *,
    early: bool = False,
) -> None:
    """Quantises rows: x [R, W], normed first where there is a norm → codes [R, W] e4m3 or int8, scales [R]
    float32; all contiguous. `present` [R] int32: rows where it is negative are left out. `early`: see
    `dependent_launch`. Raises ValueError for what does not fit."""
    if codes.shape != x.shape or (present is not None and present.shape != (len(x),)):
        raise ValueError(f"codes {tuple(codes.shape)} or the rows present do not fit {tuple(x.shape)}")
    _launch(codes, scales, x, norm, _MOST[codes.dtype], present, digits=False, early=early)


def quantize_digits(digits: Tensor, scales: Tensor, x: Tensor, norm: Norm | None = None) -> None:
    """Quantises rows to two digits: x [R, W], normed first where there is a norm → digits [2, R, W] int8, the
    high ones first, and scales [R] float32: x = scale · (128 · high + low). Raises ValueError for what does
    not fit."""
    if digits.shape != (2, *x.shape) or digits.dtype != torch.int8:
        raise ValueError(f"digits {tuple(digits.shape)} of {tuple(x.shape)}")
    _launch(digits, scales, x, norm, _MOST_DIGITS, digits=True)


def _launch(
    codes: Tensor,
    scales: Tensor,
    x: Tensor,
    norm: Norm | None,
    most: float,
    present: Tensor | None = None,
    *,
    digits: bool,
    early: bool = False,
) -> None:
    rows, width = x.shape
    if scales.shape != (rows,) or (norm is not None and norm.gain.shape != (width,)):
        raise ValueError(f"scales {tuple(scales.shape)} or the norm do not fit {tuple(x.shape)}")
    _quantize[(rows,)](
        x,
        x if norm is None else norm.gain,
        scales if present is None else present,
        codes,
        scales,
        0.0 if norm is None else norm.eps,
        WIDTH=width,
        WIDTH_POWER=triton.next_power_of_2(width),
        HAS_NORM=norm is not None,
        HAS_PRESENT=present is not None,
        DIGITS=digits,
        MOST=most,
        EARLY=early,
        num_warps=16 if width > _WIDE else 2 if width <= _NARROW and norm is None else 8,
        **dependent_launch(early),
    )


def quantize_gated_rows(
    codes: Tensor,
    scales: Tensor,
    gate_up: Tensor,
    epilogue: Epilogue,
    operand_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Activates and quantises rows: gate_up [R, 2 W], gate in the left half → codes [R, W] and scales [R] of
    the gated activation.

    `operand_scales`: gate_up is sums of codes, to be multiplied by those of its rows [R] and columns
    [2 W, 1].
    """
    rows, width = codes.shape
    if tuple(gate_up.shape) != (rows, 2 * width) or scales.shape != (rows,):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} does not fit codes {tuple(codes.shape)}")
    x_scales, w_scales = operand_scales or (scales, scales)
    _quantize_gated[(rows,)](
        gate_up,
        x_scales,
        w_scales,
        codes,
        scales,
        WIDTH=width,
        WIDTH_POWER=triton.next_power_of_2(width),
        EPILOGUE=int(epilogue),
        HAS_SCALES=operand_scales is not None,
        MOST=_MOST[codes.dtype],
        num_warps=16 if width > _WIDE else 8,
    )


def scale_rows(out: Tensor, sums: Tensor, operand_scales: tuple[Tensor, Tensor], epilogue: Epilogue) -> None:
    """sums [R, N] of codes, and scales of their rows [R] and columns [N, 1] → out [R, W] by the epilogue."""
    rows, width = out.shape
    x_scales, w_scales = operand_scales
    columns = 2 * width if epilogue.gated else width
    if tuple(sums.shape) != (rows, columns) or x_scales.shape != (rows,) or w_scales.numel() != columns:
        raise ValueError(f"sums {tuple(sums.shape)} and their scales do not fit out {tuple(out.shape)}")
    block = min(1024, triton.next_power_of_2(width))
    _scale[(rows, triton.cdiv(width, block))](
        sums,
        x_scales,
        w_scales,
        out,
        WIDTH=width,
        BLOCK=block,
        EPILOGUE=int(epilogue),
        num_warps=4,
    )
