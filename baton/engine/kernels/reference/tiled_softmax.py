"""Softmax over a context whose length is a whole number of tiles, where extra masked tiles change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16


def tiled_softmax(scores: Tensor) -> Tensor:
    """scores [..., L] float32 with -inf where masked, L a multiple of 64, one score a row finite → [..., L].

    Tiles of 64 that are masked throughout, before or behind, leave a row's other results bitwise as they
    are. On a CPU torch's own softmax has this property (tested): it adds in interleaved partial sums from
    the left. The models' reference code calls it too, and agreeing with it to the last bit is what lets
    float64 tokens be equal. Elsewhere torch's order of additions may depend on L: `softmax_in_lanes`.
    """
    return scores.softmax(-1) if scores.device.type == "cpu" else softmax_in_lanes(scores)


def softmax_in_lanes(scores: Tensor) -> Tensor:
    """The same with every addition spelled out: LANES partial sums from the left, then folded in halves."""
    exps = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(exps[..., :LANES])
    for start in range(0, exps.shape[-1], LANES):
        total += exps[..., start : start + LANES]
    while total.shape[-1] > 1:
        low, high = total.chunk(2, dim=-1)
        total = low + high
    return exps * total.reciprocal()
