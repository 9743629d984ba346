"""Gated linear units: silu(gate) · up, or gelu(gate) · up (Shazeer 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2·I], gate in the left half → [N, I] in its dtype.

    silu is spelled out as g / (1 + exp(-g)): torch's own silu takes another path for the last elements
    of a tensor than for the rest, so a row's result would depend on its place. Computed in float32 for
    half dtypes; silu is rounded to the dtype before the product, as the models' code does.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (wide / (1 + (-wide).exp())).to(up.dtype) * up


def geglu(gate_up: Tensor) -> Tensor:
    """As `swiglu`, with gelu by its approximation with tanh: g / (1 + exp(-2 · √(2/π) · (g + 0.044715 ·
    g³)))."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    z = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + (-z).exp())).to(up.dtype) * up
