"""Launches a layer's attention; how keys and values are read is the pass's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.engine.forward.layers.linear import Gemm
from baton.engine.forward.layers.residual import add_product
from baton.engine.model.layers.attention import Attention

Attend = Callable[[Attention], Tensor]
"""Computes a layer's attention from the workspace's `qkv`, writing keys and values to the cache → [rows,
heads · dim]."""


def run_attention(gemm: Gemm, attention: Attention, hidden: Tensor, qkv: Tensor, attend: Attend) -> None:
    """hidden [M, hidden] += attention(hidden); `qkv` [M, (heads + 2 kv heads) · dim] is memory in between."""
    gemm(attention.qkv, qkv, hidden)
    add_product(gemm, attention.residual, attention.output, hidden, attend(attention))
