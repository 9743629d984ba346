"""The vendor's grouped product of rows that stand by expert already, as tiles have them."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.kernels.weight_stack import WeightStack

# Bytes of which a row of each operand is a multiple.
_ALIGNED = 16


def library_multiplies(stack: WeightStack) -> bool:
    """True if the library has the product of experts like these: in bf16, of whole 16 bytes a row."""
    weight, (_, rows, columns) = stack.weight, stack.shape
    if not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16:
        return False
    return all(size * weight.itemsize % _ALIGNED == 0 for size in (rows, columns))


def product_by_library(x: Tensor, stack: WeightStack, ends: Tensor) -> Tensor:
    """x [places, K] times the matrices [E, N, K] → [places, N], in memory of its own. Expert e has the places
    up to `ends` [E] int32. Places without an entry hold anything, which changes no other's result; those
    beyond the last end are not written."""
    assert isinstance(stack.weight, Tensor)
    return torch._grouped_mm(x, stack.weight.view(stack.shape).transpose(-2, -1), offs=ends)
