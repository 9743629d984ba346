"""Keys and values in eight bits: e4m3 codes with one scale for each token and head.

    scale = max |x| / 448 over the head's vector, in bfloat16; 1 where that is 0
    code  = x / scale, rounded to the nearest e4m3, ties to even                      x ≈ code · scale

bfloat16 has the range of float32, so a vector of any magnitude keeps its relative precision. Rounding the
scale never overflows a code: x / scale stays below 464, which rounds to 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 448.0


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim], a float dtype → codes float8_e4m3fn [..., dim], scales bfloat16 [...]."""
    wide = x.float()
    scales = (wide.abs().amax(-1) / LIMIT).to(torch.bfloat16)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (wide / scales.float()[..., None]).clamp(-LIMIT, LIMIT)
    return codes.to(torch.float8_e4m3fn), scales


def restore(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes float8_e4m3fn [..., dim], scales bfloat16 [...] → [..., dim] of `dtype`; exact in float32."""
    return (codes.float() * scales.float()[..., None]).to(dtype)
