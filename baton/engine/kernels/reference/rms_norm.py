"""RMSNorm: x · weight / sqrt(mean(x²) + eps), over the last dimension (Zhang and Sennrich 2019)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] of the same dtype → [..., D] in that dtype.

    Mean and scaling are float32 for every dtype, float64 included: that is what the models are defined by.
    A row's reduction has the same order however many rows there are, from two rows on.
    """
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True)
    return weight * (wide * (variance + eps).rsqrt()).to(x.dtype)
