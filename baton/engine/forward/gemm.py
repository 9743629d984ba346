"""Matrix products: which kind of kernel computes each, and the scratch memory that they share.

A choice is data (`gemm_table`): by GPU, shape and rows. Mode `exact` takes one choice whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.dequantize import dequantized
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gemv
from baton.engine.kernels.gpu.gemm.int4_gemv import int4_gemv, int4_gemv_fits
from baton.engine.kernels.gpu.gemm.int4_linear import int4_by_digits, int4_linear
from baton.engine.kernels.gpu.gemm.quantized_linear import fits, quantized_linear
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, skinny_linear, split_space_needed
from baton.engine.kernels.gpu.gemm.split_space import SplitSpace
from baton.engine.kernels.gpu.gemm.wide_product import EPILOGUES as WIDE_EPILOGUES
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, wide_product, wide_space_needed
from baton.engine.kernels.gpu.step.quantize_rows import (
    quantize_digits,
    quantize_gated_rows,
    quantize_rows,
    scale_rows,
)
from baton.engine.kernels.gpu.step.row_ops import gated_rows, norm_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.kernels.weight_format import INT4_SPAN
from baton.engine.model.modules import DenseMlp, Linear, Model, Product


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


# Up to so many rows the library multiplies codes without their scales.
_MOST_UNSCALED_ROWS = 512


@dataclass(frozen=True, slots=True)
class DigitsTuning:
    """Two digits of x times codes of W, int4 or e4m3; tiles as `SkinnyTuning`."""

    rows: int = 16
    columns: int = 64
    splits: int = 1
    stages: int = 5
    warps: int = 4
    width: int = INT4_SPAN

    @property
    def tiles(self) -> SkinnyTuning:
        return SkinnyTuning(self.rows, self.columns, self.width, self.splits, self.stages, self.warps)


Choice = GemvTuning | SkinnyTuning | WideTuning | Library | W8A8Tuning | W8A8Library | DigitsTuning


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
    is normed], all flat; `space` for split products. `codes` [R, widest input that becomes codes], bytes,
    flat, and their scales `code_scales` [R].
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
        codes: int = 0,
    ) -> None:
        """`normed`, `gate_up`, `branch`, `codes`: widths; `space`: elements and tiles for split products."""
        self.codes = torch.empty(rows * codes, device=device, dtype=torch.uint8)
        self.code_scales = torch.empty(rows if codes else 0, device=device, dtype=torch.float32)
        self.one = torch.ones((), device=device, dtype=torch.float32)
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
            max(code_bytes(kind.linear.weight) for kind in kinds),
        )

    def __call__(self, product: Product, out: Tensor, x: Tensor) -> None:
        """x [M, K] → out [M, N]."""
        run_product(out, x, product, self._choose(product, out.shape[0]), self.scratch)

    def feed_forward(self, mlp: DenseMlp, hidden: Tensor, inner: Tensor) -> None:
        """hidden [M, hidden] += down(gate_up(hidden)); `inner` [M, intermediate] is memory in between."""
        gate_up, down = mlp.products()
        choices = {type(self._choose(product, hidden.shape[0])) for product in mlp.products()}
        fits_codes = all(w8a8_by_library(product.linear.weight, hidden.dtype) for product in mlp.products())
        if choices == {W8A8Library} and fits_codes and down.post_norm is None:
            _feed_forward_by_codes(mlp, hidden, inner.shape[1], self.scratch)
        else:
            self(gate_up, inner, hidden)
            self(down, hidden, inner)


def _feed_forward_by_codes(mlp: DenseMlp, hidden: Tensor, width: int, scratch: Scratch) -> None:
    """The gated activation becomes codes at once, and never is bfloat16 in memory."""
    rows, linear = hidden.shape[0], mlp.gate_up.linear
    assert isinstance(linear.weight, QuantizedWeight)
    scales, dtype = scratch.code_scales[:rows], linear.weight.codes.dtype
    codes = scratch.codes[: hidden.numel()].view(dtype).view(hidden.shape)
    quantize_rows(codes, scales, hidden, mlp.gate_up.norm)
    both = scratch.gate_up[: 2 * rows * width].view(rows, 2 * width)
    _multiply_codes(both, codes, scales, linear, scratch)
    operands = None if _scales_rows(codes, linear.bias) else (scales, linear.weight.scales)
    codes = scratch.codes[: rows * width].view(dtype).view(rows, width)
    quantize_gated_rows(codes, scales, both, mlp.gate_up.epilogue, operands)
    _scaled_library(hidden, codes, scales, mlp.down, scratch)


def space_needed(rows: int, product: Product, choice: Choice) -> tuple[int, int]:
    """Elements and tiles of `Scratch.space` that a product takes."""
    if isinstance(choice, SkinnyTuning | W8A8Tuning | DigitsTuning):
        tiles = choice if isinstance(choice, SkinnyTuning) else choice.tiles
        return split_space_needed(rows, product.outputs, tiles, product.epilogue)
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
    if isinstance(choice, W8A8Tuning | W8A8Library) and has_w8a8(linear.weight):
        _by_codes(out, x, product, choice, scratch)
        return
    if isinstance(choice, DigitsTuning) and has_digits(linear.weight, choice.width):
        _by_digits(out, x, product, choice, scratch)
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
        weight = dequantized(weight, x.dtype)
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


def code_bytes(weight: Weight) -> int:
    """Bytes of a row of x as codes or digits, where products with this weight may need such."""
    if not isinstance(weight, QuantizedWeight):
        return 0
    return weight.columns * (2 if has_digits(weight) else 1)


def has_digits(weight: Weight, width: int = INT4_SPAN) -> bool:
    """Whether two digits of x can be multiplied by this weight's codes, in tiles of so many columns."""
    if not isinstance(weight, QuantizedWeight):
        return False
    by_fp8 = weight.format.codes == "fp8" and fits(weight.format, width)
    return by_fp8 or int4_by_digits(weight.format)


def has_w8a8(weight: Weight) -> bool:
    """Whether codes of 8 bits with a scale a row can be multiplied by this weight's codes."""
    held = weight.format if isinstance(weight, QuantizedWeight) else None
    return held is not None and held.codes != "int4" and held.scale_columns == 0


def w8a8_by_library(weight: Weight, activations: torch.dtype) -> bool:
    """Whether the vendor's library multiplies such codes: e4m3, of sides that are multiples of 16, into
    bfloat16."""
    if activations is not torch.bfloat16 or not isinstance(weight, QuantizedWeight) or not has_w8a8(weight):
        return False
    rows, columns = weight.shape
    return weight.format.codes == "fp8" and rows % 16 == 0 and columns % 16 == 0


def _by_codes(
    out: Tensor, x: Tensor, product: Product, choice: W8A8Tuning | W8A8Library, scratch: Scratch
) -> None:
    """Quantises x's rows, and multiplies."""
    weight = product.linear.weight
    assert isinstance(weight, QuantizedWeight)
    codes = scratch.codes[: x.numel()].view(weight.codes.dtype).view(x.shape)
    scales = scratch.code_scales[: x.shape[0]]
    quantize_rows(codes, scales, x, product.norm)
    if isinstance(choice, W8A8Library) and w8a8_by_library(weight, out.dtype):
        _scaled_library(out, codes, scales, product, scratch)
        return
    tiles = choice.tiles if isinstance(choice, W8A8Tuning) else W8A8Tuning().tiles
    bias = product.linear.bias
    quantized_linear(out, codes, weight, bias, product.epilogue, tiles, scratch.space, scales)


def _by_digits(out: Tensor, x: Tensor, product: Product, choice: DigitsTuning, scratch: Scratch) -> None:
    weight, bias = product.linear.weight, product.linear.bias
    assert isinstance(weight, QuantizedWeight)
    by_int4 = weight.format.codes == "int4"
    kind = torch.int8 if by_int4 else weight.codes.dtype
    digits = scratch.codes[: 2 * x.numel()].view(kind).view(2, *x.shape)
    scales = scratch.code_scales[: x.shape[0]]
    quantize_digits(digits, scales, x, product.norm)
    if by_int4:
        int4_linear(out, digits, scales, weight, bias, product.epilogue, choice.tiles, scratch.space)
    else:
        quantized_linear(out, digits, weight, bias, product.epilogue, choice.tiles, scratch.space, scales)


def _scaled_library(out: Tensor, codes: Tensor, scales: Tensor, product: Product, scratch: Scratch) -> None:
    """Rows of e4m3 codes with their scales, times the product's weight of such."""
    weight, bias, epilogue = product.linear.weight, product.linear.bias, product.epilogue
    assert isinstance(weight, QuantizedWeight)
    scaled, target = _scales_rows(codes, bias), out
    if epilogue is not Epilogue.PLAIN or not scaled:
        target = scratch.gate_up[: out.shape[0] * weight.shape[0]].view(out.shape[0], -1)
    _multiply_codes(target, codes, scales, product.linear, scratch)
    if not scaled:
        scale_rows(out, target, (scales, weight.scales), epilogue)
    elif epilogue is Epilogue.RESIDUAL:
        out.add_(target)
    elif epilogue.gated:
        gated_rows(out, target, epilogue)


def _scales_rows(codes: Tensor, bias: Tensor | None) -> bool:
    """Whether the library applies the scales of rows, and the bias. Of few rows it is faster without, and
    bfloat16 has room for the sums of codes."""
    return bias is not None or codes.shape[0] > _MOST_UNSCALED_ROWS


def _multiply_codes(out: Tensor, codes: Tensor, scales: Tensor, linear: Linear, scratch: Scratch) -> None:
    """codes [M, K] · weightᵀ + bias → out [M, N], scaled where `_scales_rows`."""
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, QuantizedWeight)
    scaled = _scales_rows(codes, bias)
    torch._scaled_mm(
        codes,
        weight.codes.t(),
        bias=bias,
        scale_a=scales[:, None] if scaled else scratch.one,
        scale_b=weight.scales.t() if scaled else scratch.one,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


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
