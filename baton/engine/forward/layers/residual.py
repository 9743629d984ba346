"""Adds the result of attention or MLP to the residual stream."""

from __future__ import annotations

from torch import Tensor

from baton.engine.forward.layers.linear import Gemm
from baton.engine.kernels.gpu.step.row_ops import norm_rows
from baton.engine.model.layers.linear import Product
from baton.engine.model.layers.residual import Residual


def add_product(gemm: Gemm, residual: Residual, product: Product, hidden: Tensor, x: Tensor) -> None:
    """x [M, K] → hidden [M, N] += the product of x, by the residual's rule."""
    if residual.post_norm is None:
        gemm(product, hidden, x)
        return
    branch = gemm.scratch.branch[: hidden.numel()].view(hidden.shape)
    gemm(product, branch, x)
    norm_rows(hidden, branch, residual.post_norm, adds=True)
