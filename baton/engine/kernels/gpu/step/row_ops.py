"""Row operations between products, a program a row: embedding with rotary tables, norm, gated activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import let_next_begin
from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.gemv import gated


@triton.jit
def _embed(
    token,
    position,
    embedding,
    frequencies,
    hidden,
    cos_rows,
    sin_rows,
    rope_scale,
    WIDTH: tl.constexpr,
    WIDTH_POWER: tl.constexpr,
    HALF: tl.constexpr,
    HALF_POWER: tl.constexpr,
    SCALE: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(token + row).to(tl.int64)
    i = tl.arange(0, WIDTH_POWER)
    values = tl.load(embedding + source * WIDTH + i, mask=i < tl.where(source >= 0, WIDTH, 0), other=0.0)
    if SCALE != 1.0:
        values = (values.to(tl.float32) * SCALE).to(values.dtype)
    tl.store(hidden + row * WIDTH + i, values, mask=i < WIDTH)
    _rotate_row(row, position, frequencies, cos_rows, sin_rows, rope_scale, HALF, HALF_POWER)


@triton.jit
def _rotate_row(
    row, position, frequencies, cos_rows, sin_rows, scale, HALF: tl.constexpr, HALF_POWER: tl.constexpr
):
    j = tl.arange(0, HALF_POWER)
    frequency = tl.load(frequencies + j, mask=j < HALF, other=0.0)
    angle = tl.load(position + row).to(tl.float32) * frequency
    scale = tl.where(frequency != 0, scale, 1.0)  # dimensions that are not rotated are not scaled
    tl.store(cos_rows + row * HALF + j, tl.cos(angle) * scale, mask=j < HALF)
    tl.store(sin_rows + row * HALF + j, tl.sin(angle) * scale, mask=j < HALF)


@triton.jit
def _rotary(position, frequencies, cos_rows, sin_rows, scale, HALF: tl.constexpr, HALF_POWER: tl.constexpr):
    _rotate_row(tl.program_id(0), position, frequencies, cos_rows, sin_rows, scale, HALF, HALF_POWER)


def embed(
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    token: Tensor,
    position: Tensor,
    embedding: Tensor,
    frequencies: Tensor,
    rope_scale: float,
    scale: float = 1.0,
) -> None:
    """Embeds tokens: token, position [R] int32 → hidden [R, W] rows of embedding [V, W] times `scale`, and
    cos, sin [R, dim / 2].

    A token of -1 is padding: a row of zeros. frequencies [dim / 2] float32, radians a position.
    """
    rows, width = hidden.shape
    half = frequencies.shape[0]
    if embedding.shape[1] != width or tuple(rotary[0].shape) != (rows, half) or token.shape[0] < rows:
        raise ValueError("hidden, embedding and rotary tables do not fit")
    _embed[(rows,)](
        token,
        position,
        embedding,
        frequencies,
        hidden,
        *rotary,
        rope_scale,
        WIDTH=width,
        WIDTH_POWER=triton.next_power_of_2(width),
        HALF=half,
        HALF_POWER=triton.next_power_of_2(half),
        SCALE=scale,
        num_warps=8,
    )


def rotary_rows(rotary: tuple[Tensor, Tensor], position: Tensor, frequencies: Tensor, scale: float) -> None:
    """Computes rotary tables: position [R] int32 → cos, sin [R, dim / 2] of the angles, times `scale`; as
    `embed` computes them."""
    rows, half = rotary[0].shape
    if frequencies.shape[0] != half or position.shape[0] < rows:
        raise ValueError("positions, frequencies and rotary tables do not fit")
    _rotary[(rows,)](
        position,
        frequencies,
        *rotary,
        scale,
        HALF=half,
        HALF_POWER=triton.next_power_of_2(half),
        num_warps=1,
    )


@triton.jit
def _norm(x, gain, out, eps, WIDTH: tl.constexpr, WIDTH_POWER: tl.constexpr, ADDS: tl.constexpr):
    let_next_begin()
    row = tl.program_id(0)
    i = tl.arange(0, WIDTH_POWER)
    gains = tl.load(gain + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    values = tl.load(x + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    dtype: tl.constexpr = out.dtype.element_ty
    normed = values * scale
    if gain.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    normed = (normed * gains).to(dtype)
    if ADDS:
        normed += tl.load(out + row * WIDTH + i, mask=i < WIDTH, other=0.0)
    tl.store(out + row * WIDTH + i, normed, mask=i < WIDTH)


def norm_rows(out: Tensor, x: Tensor, norm: Norm, *, adds: bool = False) -> None:
    """Norms rows: x, out [R, W] → RMSNorm of each row, rounded as the reference rounds. `adds`: to what `out`
    holds."""
    gain = norm.gain
    if x.shape != out.shape or gain.shape[0] != x.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)}, out {tuple(out.shape)} and gain {tuple(gain.shape)} do not fit"
        )
    width = x.shape[1]
    _norm[(x.shape[0],)](
        x,
        gain,
        out,
        norm.eps,
        WIDTH=width,
        WIDTH_POWER=triton.next_power_of_2(width),
        ADDS=adds,
        num_warps=8,
    )


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EPILOGUE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * WIDTH) + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    result = gated(gate, up, out.dtype.element_ty, EPILOGUE)
    tl.store(out + row * WIDTH + i, result.to(out.dtype.element_ty), mask=i < WIDTH)


def gated_rows(out: Tensor, gate_up: Tensor, epilogue: Epilogue) -> None:
    """Activates gated rows: gate_up [R, 2 I], gate in the left half → out [R, I] by SWIGLU or GEGLU."""
    rows, width = out.shape
    if tuple(gate_up.shape) != (rows, 2 * width):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} does not fit out {tuple(out.shape)}")
    block = min(2048, triton.next_power_of_2(width))
    _gated[(rows, triton.cdiv(width, block))](
        gate_up,
        out,
        WIDTH=width,
        BLOCK=block,
        EPILOGUE=int(epilogue),
        num_warps=4,
    )
