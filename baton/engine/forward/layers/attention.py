"""Launches a layer's attention; how keys and values are read is the pass's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.engine.forward.layers.linear import Gemm
from baton.engine.model.layers.attention import Attention
from baton.engine.model.layers.linear import Product

Attend = Callable[[Attention], Tensor]
"""Computes a layer's attention from the workspace's `qkv`, writing keys and values to the cache → [rows,
heads · dim]."""


def run_attention(
    gemm: Gemm, attention: Attention, hidden: Tensor, qkv: Tensor, attend: Attend, then: Product | None = None
) -> None:
    """Adds attention: hidden [M, hidden] += attention(hidden); `qkv` [M, (heads + 2 kv heads) · dim] is
    memory in between. `then`: of `Gemm.add`."""
    gemm(attention.qkv, qkv, hidden)
    gemm.add(attention.residual, attention.output, hidden, attend(attention), then)
