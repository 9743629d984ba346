"""Operations on rows in plain torch: RMSNorm (Zhang and Sennrich 2019), rotary embedding (Su et al. 2021, the
form in which halves of a head are rotated), gated activations (Shazeer 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] → x · weight / sqrt(mean(x²) + eps) over the last dimension, in x's dtype.

    The quotient is rounded before a weight of that dtype multiplies it, and only afterwards where the weight
    is of another one (`fusion.Norm`).
    Mean and scaling are float32 for every dtype, float64 included: that is what the models are defined by.
    A row's reduction has the same order however many rows there are, from two rows on.
    """
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True)
    normed = wide * (variance + eps).rsqrt()
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D], cos and sin [N, D / 2] float32 → [N, heads, D] in x's dtype.

    With halves (a, b) of a head: (a·cos - b·sin, b·cos + a·sin). Computed in float64 for float64,
    otherwise in float32 and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def gated(gate_up: Tensor, epilogue: Epilogue) -> Tensor:
    """gate_up [N, 2·I], gate in the left half → [N, I] in its dtype, by SWIGLU or GEGLU.

    silu is spelled out as g / (1 + exp(-g)): torch's own silu takes another path for the last elements
    of a tensor than for the rest, so a row's result would depend on its place. gelu, by its approximation
    with tanh, is g / (1 + exp(-2 · √(2/π) · (g + 0.044715 · g³))). Computed in float32 for half dtypes;
    rounded to the dtype before the product, as the models' code does.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    z = wide
    if epilogue is Epilogue.GEGLU:
        z = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + (-z).exp())).to(up.dtype) * up
