"""Products in which codes of activations are multiplied by codes of a quantised weight."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.forward.products.scratch import Scratch
from baton.engine.gemm_dispatch.choice import DigitsTuning, RowCodesTuning, W8A8Library, W8A8Tuning
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.int4_linear import int4_by_digits, int4_linear
from baton.engine.kernels.gpu.gemm.quantize_rows import (
    quantize_digits,
    quantize_gated_rows,
    quantize_rows,
    scale_rows,
)
from baton.engine.kernels.gpu.gemm.quantized_linear import quantized_linear
from baton.engine.kernels.gpu.gemm.row_codes_linear import row_codes_fit, row_codes_linear
from baton.engine.kernels.gpu.step.row_ops import gated_rows, norm_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.model.layers.linear import Linear, Product

# Most rows for which the library multiplies codes without their scales.
MOST_UNSCALED_ROWS = 512


def code_bytes(weight: Weight) -> int:
    """Bytes of a row of x as codes or digits, where products with this weight may need such."""
    if not isinstance(weight, QuantizedWeight):
        return 0
    return weight.columns * (2 if has_digits(weight) else 1)


def has_digits(weight: Weight) -> bool:
    """True if two digits of x can be multiplied by this weight's codes: int4."""
    return isinstance(weight, QuantizedWeight) and int4_by_digits(weight.format)


def has_w8a8(weight: Weight) -> bool:
    """True if codes of 8 bits with a scale a row can be multiplied by this weight's codes."""
    weight_format = weight.format if isinstance(weight, QuantizedWeight) else None
    return weight_format is not None and weight_format.codes != "int4" and weight_format.scale_columns == 0


def has_row_codes(weight: Weight, choice: RowCodesTuning) -> bool:
    """True if x can become codes on the way to this weight, in tiles of this choice."""
    return isinstance(weight, QuantizedWeight) and row_codes_fit(weight.format, choice.width)


def w8a8_by_library(weight: Weight, activations: torch.dtype) -> bool:
    """True if the vendor's library multiplies codes of this weight: e4m3, of sides that are multiples of 16,
    into bfloat16."""
    if activations is not torch.bfloat16 or not isinstance(weight, QuantizedWeight) or not has_w8a8(weight):
        return False
    rows, columns = weight.shape
    return weight.format.codes == "fp8" and rows % 16 == 0 and columns % 16 == 0


def library_sums(rows: int, product: Product, activations: torch.dtype) -> int:
    """Elements of the library's results, for products of up to `rows` rows, that are not yet those of the
    product: their epilogue or their scales come after."""
    weight, epilogue = product.linear.weight, product.epilogue
    if epilogue.gated:
        return rows * weight.shape[0]
    if not w8a8_by_library(weight, activations):
        return 0
    unscaled = 0 if product.linear.bias is not None else min(rows, MOST_UNSCALED_ROWS)
    return (rows if epilogue is Epilogue.RESIDUAL else unscaled) * weight.shape[0]


def by_digits(out: Tensor, x: Tensor, product: Product, choice: DigitsTuning, scratch: Scratch) -> None:
    weight, bias = product.linear.weight, product.linear.bias
    assert isinstance(weight, QuantizedWeight)
    digits = scratch.codes[: 2 * x.numel()].view(torch.int8).view(2, *x.shape)
    scales = scratch.code_scales[: x.shape[0]]
    quantize_digits(digits, scales, x, product.norm)
    int4_linear(out, digits, scales, weight, bias, product.epilogue, choice.tiles, scratch.space)


def by_row_codes(out: Tensor, x: Tensor, product: Product, choice: RowCodesTuning, scratch: Scratch) -> None:
    weight, norm = product.linear.weight, product.norm
    assert isinstance(weight, QuantizedWeight)
    if norm is not None and choice.splits > 1:
        normed = scratch.normed[: x.numel()].view(x.shape)
        norm_rows(normed, x, norm)
        x, norm = normed, None
    bias, epilogue = product.linear.bias, product.epilogue
    row_codes_linear(out, x, weight, bias, epilogue, norm, choice.tiles, scratch.space)


def by_codes(
    out: Tensor, x: Tensor, product: Product, choice: W8A8Tuning | W8A8Library, scratch: Scratch
) -> None:
    """Quantises x's rows, and multiplies."""
    weight = product.linear.weight
    assert isinstance(weight, QuantizedWeight)
    codes, scales = code_rows(x.shape, weight, scratch)
    quantize_rows(codes, scales, x, product.norm)
    of_codes(out, codes, scales, product, choice, scratch)


def code_rows(shape: torch.Size, weight: QuantizedWeight, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Memory for rows of x as codes like the weight's, and for their scales [M]."""
    codes = scratch.codes[: shape.numel()].view(weight.codes.dtype).view(shape)
    return codes, scratch.code_scales[: shape[0]]


def of_codes(
    out: Tensor,
    codes: Tensor,
    scales: Tensor,
    product: Product,
    choice: W8A8Tuning | W8A8Library,
    scratch: Scratch,
) -> None:
    """Multiplies rows that are codes, normed where the product has a norm, with their scales [M]."""
    weight = product.linear.weight
    assert isinstance(weight, QuantizedWeight)
    if isinstance(choice, W8A8Library) and w8a8_by_library(weight, out.dtype):
        _scaled_library(out, codes, scales, product, scratch)
        return
    tiles = choice.tiles if isinstance(choice, W8A8Tuning) else W8A8Tuning().tiles
    bias = product.linear.bias
    quantized_linear(out, codes, weight, bias, product.epilogue, tiles, scratch.space, scales)


def gated_pair_by_codes(
    gate_up: Product, down: Product, hidden: Tensor, width: int, scratch: Scratch
) -> None:
    """Adds a gated MLP: hidden [M, hidden] += down(gate_up(hidden)), both of codes, with `width` values in
    between: these become codes at once, and never are bfloat16 in memory."""
    rows, linear = hidden.shape[0], gate_up.linear
    assert isinstance(linear.weight, QuantizedWeight)
    scales, dtype = scratch.code_scales[:rows], linear.weight.codes.dtype
    codes = scratch.codes[: hidden.numel()].view(dtype).view(hidden.shape)
    quantize_rows(codes, scales, hidden, gate_up.norm)
    both = scratch.sums[: 2 * rows * width].view(rows, 2 * width)
    _multiply_codes(both, codes, scales, linear, scratch)
    operands = None if _scales_rows(codes, linear.bias) else (scales, linear.weight.scales)
    codes = scratch.codes[: rows * width].view(dtype).view(rows, width)
    quantize_gated_rows(codes, scales, both, gate_up.epilogue, operands)
    _scaled_library(hidden, codes, scales, down, scratch)


def _scaled_library(out: Tensor, codes: Tensor, scales: Tensor, product: Product, scratch: Scratch) -> None:
    """Rows of e4m3 codes with their scales, times the product's weight of such."""
    weight, bias, epilogue = product.linear.weight, product.linear.bias, product.epilogue
    assert isinstance(weight, QuantizedWeight)
    scaled, target = _scales_rows(codes, bias), out
    if epilogue is not Epilogue.PLAIN or not scaled:
        target = scratch.sums[: out.shape[0] * weight.shape[0]].view(out.shape[0], weight.shape[0])
    _multiply_codes(target, codes, scales, product.linear, scratch)
    if not scaled:
        scale_rows(out, target, (scales, weight.scales), epilogue)
    elif epilogue is Epilogue.RESIDUAL:
        out.add_(target)
    elif epilogue.gated:
        gated_rows(out, target, epilogue)


def _scales_rows(codes: Tensor, bias: Tensor | None) -> bool:
    """True if the library applies the scales of rows, and the bias. With few rows it is faster without, and
    bfloat16 has room for the sums of codes."""
    return bias is not None or codes.shape[0] > MOST_UNSCALED_ROWS


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
