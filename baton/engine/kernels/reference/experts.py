"""A mixture of experts (Shazeer et al. 2017) in plain torch: the router, and the sum of the experts taken."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.reference.linear import linear, pad_rows
from baton.engine.kernels.reference.row_ops import gated
from baton.engine.kernels.weight_stack import WeightStack

NO_EXPERT = -1


def route(x: Tensor, router: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """x [N, H], router [E, H] → the experts of each row [N, k] int64, and their weights [N, k] float32.

    The weights are the largest of the softmax over all experts, in descending order; of equal ones the lower
    expert comes first. `normalise`: they are divided by their sum. Logits are at least float32 and the
    softmax is float32 for every dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    shares = linear(x.to(wide), router.to(wide)).softmax(-1, dtype=torch.float32)
    weights, ids = shares.sort(stable=True, dim=-1, descending=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return ids, weights / weights.sum(-1, keepdim=True) if normalise else weights


def mix(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: WeightStack, down: WeightStack, gate: Epilogue
) -> Tensor:
    """x [N, H], ids and weights [N, k] → the weighted sum of each row's experts [N, H] in x's dtype.

    Sums are at least float32, in the order of the experts' numbers. Entries of NO_EXPERT add nothing, and
    experts that no row takes are not read.
    """
    sums = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in sorted(set(ids.flatten().tolist()) - {NO_EXPERT}):
        row, place = (ids == expert).nonzero(as_tuple=True)
        inner = gated(linear(pad_rows(x[row]), gate_up.matrix(expert)), gate)
        result = linear(inner, down.matrix(expert))[: len(row)]
        sums[row] += result * weights[row, place, None]
    return sums.to(x.dtype)
