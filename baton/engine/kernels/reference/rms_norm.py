"""RMSNorm: x · weight / sqrt(mean(x²) + eps), over the last dimension (Zhang and Sennrich 2019)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] → [..., D] in x's dtype. It is rounded before a weight of that dtype multiplies
    it, and only afterwards where the weight is of another one (`fusion.Norm`).

    Mean and scaling are float32 for every dtype, float64 included: that is what the models are defined by.
    A row's reduction has the same order however many rows there are, from two rows on.
    """
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True)
    normed = wide * (variance + eps).rsqrt()
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)
