"""The sampler's filters alone."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.sampling import reference
from baton.engine.sampling.reference import Filters, Sampling


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [B, V], top_k [B] int64, top_p and min_p [B] → logits with -inf for each token dropped."""
    sampling = Sampling(torch.ones_like(top_p), top_k, top_p, torch.zeros_like(top_k), min_p)
    return reference.filtered(logits, sampling, Filters.of(sampling, logits.shape[1]))
