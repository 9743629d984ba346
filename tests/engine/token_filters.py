"""Filters of the sampler without its draw."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from baton.engine.sampling import reference
from baton.engine.sampling.reference import Filters, Sampling
from baton.engine.sequence import SamplingParams


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """logits [B, V] → logits by temperature, with -inf for each token that these parameters drop."""
    return filtered_by(logits, Sampling.of_params([params] * logits.shape[0], logits.device))


def filtered_by(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [B, V] → as `filtered`, by each row's own parameters. A temperature of 0 counts as 1."""
    warm = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    sampling = dataclasses.replace(sampling, temperature=warm)
    return reference.filtered(logits, sampling, Filters.of(sampling, logits.shape[1]))
