"""What lies between the products, a program a row: embedding with rotary tables, norm, SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import let_next_begin
from baton.engine.kernels.gpu.gemm.gemv import silu_times


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
):
    row = tl.program_id(0)
    source = tl.load(token + row).to(tl.int64)
    i = tl.arange(0, WIDTH_POWER)
    values = tl.load(embedding + source * WIDTH + i, mask=i < tl.where(source >= 0, WIDTH, 0), other=0.0)
    tl.store(hidden + row * WIDTH + i, values, mask=i < WIDTH)
    j = tl.arange(0, HALF_POWER)
    angle = tl.load(position + row).to(tl.float32) * tl.load(frequencies + j, mask=j < HALF, other=0.0)
    tl.store(cos_rows + row * HALF + j, tl.cos(angle) * rope_scale, mask=j < HALF)
    tl.store(sin_rows + row * HALF + j, tl.sin(angle) * rope_scale, mask=j < HALF)


def embed(
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    token: Tensor,
    position: Tensor,
    embedding: Tensor,
    frequencies: Tensor,
    rope_scale: float,
) -> None:
    """token, position [R] int32 → hidden [R, W] rows of embedding [V, W], and cos, sin [R, dim / 2].

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
        num_warps=8,
    )


@triton.jit
def _norm(x, gain, out, eps, WIDTH: tl.constexpr, WIDTH_POWER: tl.constexpr):
    let_next_begin()
    row = tl.program_id(0)
    i = tl.arange(0, WIDTH_POWER)
    gains = tl.load(gain + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    values = tl.load(x + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    dtype: tl.constexpr = out.dtype.element_ty
    normed = (values * scale).to(dtype).to(tl.float32) * gains
    tl.store(out + row * WIDTH + i, normed.to(dtype), mask=i < WIDTH)


def norm_rows(out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
    """x, out [R, W], gain [W] → RMSNorm of each row, rounded as `kernels.rms_norm` rounds."""
    if x.shape != out.shape or gain.shape[0] != x.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)}, out {tuple(out.shape)} and gain {tuple(gain.shape)} do not fit"
        )
    width = x.shape[1]
    _norm[(x.shape[0],)](
        x,
        gain,
        out,
        eps,
        WIDTH=width,
        WIDTH_POWER=triton.next_power_of_2(width),
        num_warps=8,
    )


@triton.jit
def _swiglu(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * WIDTH) + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    result = silu_times(gate, up, out.dtype.element_ty)
    tl.store(out + row * WIDTH + i, result.to(out.dtype.element_ty), mask=i < WIDTH)


def swiglu_rows(out: Tensor, gate_up: Tensor) -> None:
    """gate_up [R, 2 I], gate in the left half → out [R, I]."""
    rows, width = out.shape
    if tuple(gate_up.shape) != (rows, 2 * width):
        raise ValueError(f"gate_up {tuple(gate_up.shape)} does not fit out {tuple(out.shape)}")
    block = min(2048, triton.next_power_of_2(width))
    _swiglu[(rows, triton.cdiv(width, block))](
        gate_up,
        out,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
