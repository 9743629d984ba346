"""The number formats of a model on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights`: of the matrices; `activations`: of what layers pass on, biases and norms; `cache`: of keys
    and values."""

    weights: torch.dtype
    activations: torch.dtype
    cache: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Precision:
        """One dtype for all three."""
        return cls(dtype, dtype, dtype)
