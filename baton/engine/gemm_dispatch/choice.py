"""The kinds of kernels that a product is computed by, each with its tiles, and what a choice depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.kernels.gpu.gemm.streamed_product import StreamedTuning
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning
from baton.engine.kernels.weight_format import INT4_SPAN
from baton.engine.model.layers.linear import Product


@dataclass(frozen=True, slots=True)
class Library:
    """The vendor's library, with norm and SwiGLU as kernels of their own."""


@dataclass(frozen=True, slots=True)
class W8A8Tuning:
    """Codes of x times codes of W, both of 8 bits; tiles as `SkinnyTuning`."""

    rows: int = 128
    columns: int = 128
    width: int = 128
    splits: int = 1
    stages: int = 3
    warps: int = 8

    @property
    def tiles(self) -> SkinnyTuning:
        return SkinnyTuning(self.rows, self.columns, self.width, self.splits, self.stages, self.warps)


@dataclass(frozen=True, slots=True)
class W8A8Library:
    """Codes of x times codes of W, both e4m3, by the vendor's library."""


@dataclass(frozen=True, slots=True)
class DigitsTuning:
    """Two digits of x times int4 codes of W; tiles as `SkinnyTuning`."""

    rows: int = 16
    columns: int = 64
    splits: int = 1
    stages: int = 5
    warps: int = 4

    @property
    def tiles(self) -> SkinnyTuning:
        return SkinnyTuning(self.rows, self.columns, INT4_SPAN, self.splits, self.stages, self.warps)


@dataclass(frozen=True, slots=True)
class RowCodesTuning:
    """Codes of W of 8 bits times x, whose tiles become codes on the way; tiles as `SkinnyTuning`. Without
    splits, a norm is part of the kernel."""

    rows: int = 16
    columns: int = 64
    width: int = 128
    splits: int = 1
    stages: int = 5
    warps: int = 4

    @property
    def tiles(self) -> SkinnyTuning:
        return SkinnyTuning(self.rows, self.columns, self.width, self.splits, self.stages, self.warps)


Choice = (
    GemvTuning
    | SkinnyTuning
    | WideTuning
    | StreamedTuning
    | Library
    | W8A8Tuning
    | W8A8Library
    | DigitsTuning
    | RowCodesTuning
)


@dataclass(frozen=True, slots=True)
class ProductKey:
    """The key of a choice: the product's name, the rows of x, W's shape [n, k], W's format (`Linear.format`)
    and the dtype of x as torch spells it."""

    product: str
    rows: int
    n: int
    k: int
    weight_dtype: str
    act_dtype: str

    @classmethod
    def of(cls, product: Product, rows: int, activations: torch.dtype) -> ProductKey:
        n, k = product.linear.weight.shape
        return cls(product.name, rows, n, k, product.linear.format, dtype_name(activations))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without torch's prefix: torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")
