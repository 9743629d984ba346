"""Launches a gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from baton.engine.forward.layers.linear import Gemm
from baton.engine.forward.products.code_products import gated_pair_by_codes
from baton.engine.kernels.fusion import Epilogue
from baton.engine.model.layers.linear import Product
from baton.engine.model.layers.mlp import DenseMlp


def run_dense_mlp(
    gemm: Gemm, mlp: DenseMlp, hidden: Tensor, inner: Tensor, then: Product | None = None
) -> None:
    """Adds the MLP: hidden [M, hidden] += mlp(hidden); `inner` [M, inner width] is memory in between. Where
    both products are of codes, the gated activation becomes codes at once and never is bfloat16 in memory.
    `then`: of `Gemm.add`."""
    gate_up, down = mlp.products()
    adds = down.epilogue is Epilogue.RESIDUAL
    if adds and all(gemm.by_codes(one, hidden.shape[0]) for one in (gate_up, down)):
        gated_pair_by_codes(gate_up, down, hidden, inner.shape[1], gemm.scratch)
    else:
        gemm(gate_up, inner, hidden)
        gemm.add(mlp.residual, down, hidden, inner, then)
