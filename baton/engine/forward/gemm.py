"""Matrix products: which of four kinds of kernel computes each, and the scratch memory that they share.

A choice is data (`gemm_table`): by GPU, shape and rows. Mode `exact` takes one choice whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gemv
from baton.engine.kernels.gpu.gemm.int4_gemv import int4_gemv, int4_gemv_fits
from baton.engine.kernels.gpu.gemm.quantized_linear import fits, quantized_linear
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, skinny_linear, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.gemm.wide_product import EPILOGUES as WIDE_EPILOGUES
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, wide_product, wide_space_needed
from baton.engine.kernels.gpu.step.row_ops import gated_rows, norm_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.model.modules import Model, Product


@dataclass(frozen=True, slots=True)
class Library:
    """The vendor's library, with norm and SwiGLU as kernels of their own."""


Choice = GemvTuning | SkinnyTuning | WideTuning | Library


@dataclass(frozen=True, slots=True)
class ProductKey:
    """What a choice depends on: the product's name, the rows of x, W's shape [n, k], W's format
    (`Linear.format`) and the dtype of x as torch spells it."""

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


class Scratch:
    """Memory that products of up to R rows need beside their operands, shared by all of a stream.

    `normed` [R, widest normed input], `gate_up` [R, widest gate and up] and `branch` [R, widest output that
    is normed], all flat; `space` for split products.
    """

    def __init__(
        self,
        rows: int,
        normed: int,
        gate_up: int,
        space: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        branch: int = 0,
    ) -> None:
        """`normed`, `gate_up`, `branch`: widths; `space`: elements and tiles for split products."""
        self.normed = torch.empty(rows * normed, device=device, dtype=dtype)
        self.gate_up = torch.empty(rows * gate_up, device=device, dtype=dtype)
        self.branch = torch.empty(rows * branch, device=device, dtype=dtype)
        self.space = SplitSpace(max(1, space[0]), max(1, space[1]), device)


class Gemm:
    """Computes a model's products, each by the kernel that `choose` gives for it and its rows."""

    def __init__(
        self, model: Model, batches: Iterable[int], choose: Callable[[Product, int], Choice]
    ) -> None:
        """`batches`: every number of rows that split products may have; scratch is sized for all of them."""
        self._choose = choose
        batches, kinds = list(batches), model.product_kinds()
        needs = [space_needed(rows, kind, choose(kind, rows)) for kind in kinds for rows in batches]
        self.scratch = Scratch(
            max(batches),
            max(kind.inputs for kind in kinds if kind.norm is not None),
            max(2 * kind.outputs for kind in kinds if kind.epilogue.gated),
            (max(elements for elements, _ in needs), max(tiles for _, tiles in needs)),
            model.device,
            model.precision.activations,
            max((kind.outputs for kind in kinds if kind.post_norm is not None), default=0),
        )

    def __call__(self, product: Product, out: Tensor, x: Tensor) -> None:
        """x [M, K] → out [M, N]."""
        run_product(out, x, product, self._choose(product, out.shape[0]), self.scratch)


def space_needed(rows: int, product: Product, choice: Choice) -> tuple[int, int]:
    """Elements and tiles of `Scratch.space` that a product takes."""
    if isinstance(choice, SkinnyTuning):
        return split_space_needed(rows, product.outputs, choice, product.epilogue)
    if isinstance(choice, WideTuning):
        return wide_space_needed(rows, product.outputs, choice)
    return 0, 0


def run_product(out: Tensor, x: Tensor, product: Product, choice: Choice, scratch: Scratch) -> None:
    """x [M, K] → out [M, N] by the kernel of `choice`; what a wide product cannot do goes to the library.

    A quantised weight that the kernel has no code for is dequantised first.
    """
    if product.post_norm is None:
        _run(out, x, product, choice, scratch)
    else:
        branch = scratch.branch[: out.numel()].view(out.shape)
        _run(branch, x, product, choice, scratch)
        norm_rows(out, branch, product.post_norm, adds=True)


def _run(out: Tensor, x: Tensor, product: Product, choice: Choice, scratch: Scratch) -> None:
    """`run_product` but for the norm of the result."""
    linear, epilogue, norm = product.linear, product.epilogue, product.norm
    if isinstance(choice, GemvTuning) and has_gemv(linear.weight):
        _one_row(out, x, product, choice)
        return
    if norm is not None:
        normed = scratch.normed[: x.numel()].view(x.shape)
        norm_rows(normed, x, norm)
        x = normed
    weight = linear.weight
    if isinstance(weight, QuantizedWeight):
        if isinstance(choice, SkinnyTuning) and fits(weight.format, choice.width):
            quantized_linear(out, x, weight, linear.bias, epilogue, choice, scratch.space)
            return
        weight = weight.dequantized(x.dtype)
    if isinstance(choice, SkinnyTuning):
        skinny_linear(out, x, weight, linear.bias, epilogue, choice, scratch.space)
        return
    if isinstance(choice, WideTuning) and linear.bias is None and epilogue in WIDE_EPILOGUES:
        wide_product(out, x, weight, epilogue, choice, scratch.space)
        return
    _by_library(out, x, weight.t(), product, scratch)


def has_gemv(weight: Weight) -> bool:
    """Whether there is a kernel for one row times this weight."""
    if not isinstance(weight, QuantizedWeight):
        return True
    held = weight.format
    return int4_gemv_fits(held) or (held.codes != "int4" and held.scale_columns == 0)


def _one_row(out: Tensor, x: Tensor, product: Product, tuning: GemvTuning) -> None:
    weight, bias = product.linear.weight, product.linear.bias
    if isinstance(weight, QuantizedWeight) and weight.format.codes == "int4":
        int4_gemv(out, x, weight, bias, product.epilogue, product.norm, tuning)
    else:
        gemv(out, x, weight, bias, product.epilogue, product.norm, tuning)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _by_library(out: Tensor, x: Tensor, weight: Tensor, product: Product, scratch: Scratch) -> None:
    """`weight` [K, N]."""
    bias, epilogue = product.linear.bias, product.epilogue
    if epilogue is Epilogue.RESIDUAL:
        out.addmm_(x, weight)
        if bias is not None:
            out.add_(bias)
        return
    target = out
    if epilogue.gated:
        target = scratch.gate_up[: 2 * out.numel()].view(out.shape[0], -1)
    if bias is None:
        torch.mm(x, weight, out=target)
    else:
        torch.addmm(bias, x, weight, out=target)
    if epilogue.gated:
        gated_rows(out, target, epilogue)
