"""Which kernel computes a product: the same five products a step, each by the fastest of four kinds.

The choice is data (`product_table`): by GPU, shape and rows. Without a table a default holds that no
shape makes slow by much. Mode `exact` takes one choice whatever the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.gpu.gemm.gemv import Epilogue, GemvTuning, Norm, gemv
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, skinny_linear, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, wide_product, wide_space_needed
from baton.engine.kernels.gpu.step.row_ops import norm_rows, swiglu_rows
from baton.engine.model.reference import Linear

PRODUCTS = ("qkv", "output", "gate_up", "down", "head")
EPILOGUES = {
    "qkv": Epilogue.PLAIN,
    "output": Epilogue.RESIDUAL,
    "gate_up": Epilogue.SWIGLU,
    "down": Epilogue.RESIDUAL,
    "head": Epilogue.PLAIN,
}


@dataclass(frozen=True, slots=True)
class Library:
    """The vendor's library, with norm and SwiGLU as kernels of their own."""


Choice = GemvTuning | SkinnyTuning | WideTuning | Library


@dataclass(frozen=True, slots=True)
class Scratch:
    """What products of up to R rows need beside their operands, shared by all that follow one another.

    `normed` [R, widest input], `gate_up` [R, 2 · inner], both flat; `space` for split products.
    """

    normed: Tensor
    gate_up: Tensor
    space: SplitSpace

    @classmethod
    def empty(
        cls,
        rows: int,
        hidden: int,
        inner: int,
        space: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Scratch:
        return cls(
            torch.empty(rows * hidden, device=device, dtype=dtype),
            torch.empty(rows * 2 * inner, device=device, dtype=dtype),
            SplitSpace.empty(max(1, space[0]), max(1, space[1]), device),
        )


def space_needed(rows: int, weight_rows: int, product: str, choice: Choice) -> tuple[int, int]:
    """Elements and tiles of `Scratch.space` that a product with `weight_rows` rows of W takes."""
    epilogue = EPILOGUES[product]
    outputs = weight_rows // 2 if epilogue is Epilogue.SWIGLU else weight_rows
    if isinstance(choice, SkinnyTuning):
        return split_space_needed(rows, outputs, choice, epilogue)
    if isinstance(choice, WideTuning):
        return wide_space_needed(rows, outputs, choice)
    return 0, 0


def run_product(
    out: Tensor,
    x: Tensor,
    linear: Linear,
    epilogue: Epilogue,
    norm: Norm | None,
    choice: Choice,
    scratch: Scratch,
) -> None:
    """x [M, K], normed first where `norm` is given, times the weights → out [M, N] by `epilogue`."""
    if isinstance(choice, GemvTuning):
        gemv(out, x, linear.weight, linear.bias, epilogue, norm, choice)
        return
    if norm is not None:
        normed = scratch.normed[: x.numel()].view(x.shape)
        norm_rows(normed, x, norm.gain, norm.eps)
        x = normed
    if isinstance(choice, SkinnyTuning):
        skinny_linear(out, x, linear.weight, linear.bias, epilogue, choice, scratch.space)
        return
    if isinstance(choice, WideTuning) and linear.bias is None:
        wide_product(out, x, linear.weight, epilogue, choice, scratch.space)
        return
    _by_library(out, x, linear, epilogue, scratch)


def _by_library(out: Tensor, x: Tensor, linear: Linear, epilogue: Epilogue, scratch: Scratch) -> None:
    weight, bias = linear.weight.t(), linear.bias
    if epilogue is Epilogue.RESIDUAL:
        out.addmm_(x, weight)
        if bias is not None:
            out.add_(bias)
        return
    target = out
    if epilogue is Epilogue.SWIGLU:
        target = scratch.gate_up[: 2 * out.numel()].view(out.shape[0], -1)
    if bias is None:
        torch.mm(x, weight, out=target)
    else:
        torch.addmm(bias, x, weight, out=target)
    if epilogue is Epilogue.SWIGLU:
        swiglu_rows(out, target)
