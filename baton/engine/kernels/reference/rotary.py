"""Rotary position embedding applied to query or key heads (Su et al. 2021, the half-split form of Llama)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D], cos and sin [N, D / 2] float32 → [N, heads, D] in x's dtype.

    With halves (a, b) of a head: (a·cos - b·sin, b·cos + a·sin). Computed in float64 for float64,
    otherwise in float32 and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
