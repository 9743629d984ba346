"""Draws the next token of each row. Order: temperature, top-k, top-p over what top-k left, draw.

A draw takes the largest of (scaled logit + Gumbel noise) among the tokens left, and the noise is
Philox(seed, position, purpose, vocabulary index): a row's token depends on its own logits, parameters,
seed and position, and on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.philox import random_words

PURPOSE_DRAW = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """One row's parameters at each index; every tensor is [B].

    `temperature` float32: 0 takes the largest raw logit, the lowest index of several.
    `top_k` int64: 0 or less keeps all. `top_p` float32: 1 or more keeps all.
    `seed` int64: the bits of an unsigned 64-bit seed.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor


@torch.inference_mode()
def sample(logits: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
    """logits [B, V]; positions [B] int64, each the index in its sequence of the token drawn → [B] int64."""
    greedy = logits.argmax(-1)
    drawing = sampling.temperature > 0
    if not bool(drawing.any()):
        return greedy
    # Greedy rows run along at temperature 1; float64 keeps tiny probabilities apart.
    temperature = torch.where(drawing, sampling.temperature.double(), 1.0)
    scaled = logits.double() / temperature[:, None]
    kept = filtered(scaled, sampling.top_k, sampling.top_p)
    noise = gumbel(sampling.seed, positions, logits.shape[1])
    return torch.where(drawing, (kept + noise).argmax(-1), greedy)


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits [B, V], top_k [B] int64, top_p [B] → logits with -inf for each token that a filter drops.

    Top-k keeps the k largest; top-p, of the distribution over these, the fewest largest whose
    probabilities reach p, at least one. A token equal to the last one kept is kept as well.
    """
    limits_k = (top_k > 0) & (top_k < logits.shape[1])
    limits_p = top_p < 1
    if not bool((limits_k | limits_p).any()):
        return logits
    ordered = logits.sort(-1, descending=True).values
    last = torch.where(limits_k, top_k, logits.shape[1]) - 1
    threshold = ordered.gather(-1, last[:, None])
    # Ties at the threshold stand beside it, so a comparison rather than an index tells who is left.
    left = ordered.masked_fill(ordered < threshold, -torch.inf)
    probabilities = left.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    needed = ((before < top_p[:, None]) & (left > -torch.inf)).sum(-1).clamp(min=1)
    nucleus = ordered.gather(-1, (needed - 1)[:, None])
    threshold = torch.where(limits_p[:, None], torch.maximum(threshold, nucleus), threshold)
    return logits.masked_fill(logits < threshold, -torch.inf)


def gumbel(seed: Tensor, positions: Tensor, count: int) -> Tensor:
    """seed, positions [B] int64 → standard Gumbel noise [B, count] float64."""
    words = random_words(seed, positions, PURPOSE_DRAW, count)
    uniform = (words.double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()
