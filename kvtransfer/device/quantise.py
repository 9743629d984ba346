"""Keys and values in eight bits on the wire, with a scale for each token and head.

    scale = max |x| / limit over the row, 1 where that is 0           limit = 448 (e4m3), 127 (int8)
    code  = x / scale, rounded to nearest even                        x ≈ code · scale

A row is one head's vector of one token: the last dimension of a block. The rounding error is at most 1/16 of
an element (e4m3, above scale · 2^-6), or half a scale (int8).

A GPU runs `kvtransfer.device.kernels.quantise`, a CPU the reference here; both give the same bits.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EightBit(Enum):
    """An 8-bit format; the value is its largest magnitude."""

    E4M3 = 448.0
    INT8 = 127.0


def quantise(rows: Tensor, kind: EightBit) -> tuple[Tensor, Tensor]:
    """rows [n, dim] float32, bfloat16 or float16, contiguous → codes uint8 [n, dim], scales float32 [n]."""
    if rows.device.type == "cpu":
        return _quantise(rows, kind)
    return quantise_by_kernel(rows, kind)


def restore(codes: Tensor, scales: Tensor, kind: EightBit, dtype: torch.dtype) -> Tensor:
    """Inverse of `quantise`: codes uint8 [n, dim], scales float32 [n] → rows [n, dim] of `dtype`, one of
    those that `quantise` takes; ValueError for another."""
    if dtype not in _DTYPES:
        raise ValueError(f"rows are restored as float32, bfloat16 or float16, not {dtype}")
    if codes.device.type == "cpu":
        return _restore(codes, scales, kind, dtype)
    return restore_by_kernel(codes, scales, kind, dtype)


def quantise_by_kernel(rows: Tensor, kind: EightBit) -> tuple[Tensor, Tensor]:
    """`quantise` by the Triton kernel, which is imported when first needed."""
    from kvtransfer.device.kernels import quantise as eight_bit

    codes = torch.empty_like(rows, dtype=torch.uint8)
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    eight_bit.quantise(rows, codes, scales, is_float=kind is EightBit.E4M3, limit=kind.value)
    return codes, scales


def restore_by_kernel(codes: Tensor, scales: Tensor, kind: EightBit, dtype: torch.dtype) -> Tensor:
    """`restore` by the Triton kernel, which is imported when first needed."""
    from kvtransfer.device.kernels import quantise as eight_bit

    rows = torch.empty_like(codes, dtype=dtype)
    target = rows if dtype is torch.float32 else rows.view(torch.int16)
    is_float, bfloat = kind is EightBit.E4M3, dtype is torch.bfloat16
    eight_bit.restore(codes, scales, target, is_float=is_float, bfloat=bfloat)
    return rows


def _quantise(rows: Tensor, kind: EightBit) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    largest = wide.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / kind.value, torch.ones_like(largest))
    scaled = (wide / scales[:, None]).clamp(-kind.value, kind.value)
    if kind is EightBit.E4M3:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
    return scaled.round().to(torch.int8).view(torch.uint8), scales


def _restore(codes: Tensor, scales: Tensor, kind: EightBit, dtype: torch.dtype) -> Tensor:
    typed = codes.view(torch.float8_e4m3fn if kind is EightBit.E4M3 else torch.int8)
    return (typed.float() * scales[:, None]).to(dtype)
