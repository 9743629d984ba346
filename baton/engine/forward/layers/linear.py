"""Matrix products: each is computed by the kernel of a choice (`gemm_dispatch`).

A choice is data (`gemm_dispatch`): by GPU, shape and rows. Mode `exact` takes one choice whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.forward.products.code_products import (
    by_codes,
    by_digits,
    by_row_codes,
    code_bytes,
    code_rows,
    has_digits,
    has_row_codes,
    has_w8a8,
    library_sums,
    of_codes,
    w8a8_by_library,
)
from baton.engine.forward.products.scratch import Scratch
from baton.engine.gemm_dispatch.choice import (
    Choice,
    DigitsTuning,
    RowCodesTuning,
    W8A8Library,
    W8A8Tuning,
)
from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.gpu.gemm.dequantize import dequantized
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning, gemv
from baton.engine.kernels.gpu.gemm.int4_gemv import int4_gemv, int4_gemv_fits
from baton.engine.kernels.gpu.gemm.quantized_linear import fits, quantized_linear
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning, skinny_linear, split_space_needed
from baton.engine.kernels.gpu.gemm.streamed_product import (
    StreamedTuning,
    streamed_fits,
    streamed_product,
    streamed_space_needed,
)
from baton.engine.kernels.gpu.gemm.wide_product import EPILOGUES as WIDE_EPILOGUES
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, wide_product, wide_space_needed
from baton.engine.kernels.gpu.step.row_ops import gated_rows, norm_rows
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.model.layers.linear import Product
from baton.engine.model.layers.residual import Residual
from baton.engine.model.modules import Model
from baton.engine.parallel.rank_exchange import RankExchange


@dataclass(frozen=True, slots=True)
class _Normed:
    """Rows that a sum has normed for the product behind it; their codes where they have `scales`."""

    norm: Norm
    rows: Tensor
    scales: Tensor | None = None


class Gemm:
    """Computes a model's products, each by the kernel that `choose` gives for it and its rows."""

    def __init__(
        self,
        model: Model,
        batches: Iterable[int],
        choose: Callable[[Product, int], Choice],
        exchange: RankExchange | None = None,
    ) -> None:
        """`batches`: every number of rows that split products may have; scratch is sized for all of them.
        `exchange`: adds up the results of all ranks of a model that is divided."""
        self._choose = choose
        self._exchange = exchange
        self._normed: _Normed | None = None
        batches, kinds = list(batches), model.product_kinds()
        needs = [space_needed(rows, kind, choose(kind, rows)) for kind in kinds for rows in batches]
        self.scratch = Scratch(
            max(batches),
            max(kind.inputs for kind in kinds if kind.norm is not None),
            max(library_sums(max(batches), kind, model.precision.activations) for kind in kinds),
            (max(elements for elements, _ in needs), max(tiles for _, tiles in needs)),
            model.device,
            model.precision.activations,
            model.config.hidden_size if model.config.layer_norms.of_results else 0,
            max(code_bytes(kind.linear.weight) for kind in kinds),
        )

    def __call__(self, product: Product, out: Tensor, x: Tensor) -> None:
        """x [M, K] → out [M, N]."""
        choice = self._choose(product, out.shape[0])
        if (normed := self._normed) is not None and normed.norm is product.norm:
            self._normed, x, product = None, normed.rows, replace(product, norm=None)
            if normed.scales is not None:
                assert isinstance(choice, W8A8Tuning | W8A8Library)
                of_codes(out, x, normed.scales, product, choice, self.scratch)
                return
        run_product(out, x, product, choice, self.scratch)

    def add(
        self, residual: Residual, product: Product, hidden: Tensor, x: Tensor, then: Product | None
    ) -> None:
        """Adds a product to the residual stream: x [M, K] → hidden [M, N] += the product of x, by the
        residual's rule. `then`: the product that is launched next, of `hidden`: an exchange computes its norm
        with the sum, and the codes of that where it is multiplied by such."""
        if residual.divided:
            assert self._exchange is not None
            self(product, self._exchange.part(hidden.shape[0]), x)
            self._normed = normed = self._normed_for(then, hidden)
            if normed is None:
                self._exchange.reduce(hidden, residual.post_norm, None)
            else:
                norm = normed.norm, normed.rows
                self._exchange.reduce(hidden, residual.post_norm, norm, normed.scales)
            return
        if residual.post_norm is None:
            self(product, hidden, x)
            return
        branch = self.scratch.branch[: hidden.numel()].view(hidden.shape)
        self(product, branch, x)
        norm_rows(hidden, branch, residual.post_norm, adds=True)

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Norms hidden [M, hidden] behind the last layer → [M, hidden], a view of scratch; where an exchange
        has computed that with the last sum, it is there already."""
        normed, known = self.scratch.normed[: hidden.numel()].view(hidden.shape), self._normed
        if known is None or known.norm is not norm or known.scales is not None:
            norm_rows(normed, hidden, norm)
        self._normed = None
        return normed

    def _normed_for(self, product: Product | None, hidden: Tensor) -> _Normed | None:
        """Memory for the norm of a product's input, as codes where it is multiplied as such; None where it
        has no norm."""
        if product is None or product.norm is None:
            return None
        weight, choice = product.linear.weight, self._choose(product, hidden.shape[0])
        if isinstance(choice, W8A8Tuning | W8A8Library) and has_w8a8(weight):
            assert isinstance(weight, QuantizedWeight)
            if weight.format.codes == "fp8":
                return _Normed(product.norm, *code_rows(hidden.shape, weight, self.scratch))
        return _Normed(product.norm, self.scratch.normed[: hidden.numel()].view(hidden.shape))

    def by_codes(self, product: Product, rows: int) -> bool:
        """True if the vendor's library multiplies codes of `rows` rows with the product's codes."""
        weight, activations = product.linear.weight, self.scratch.normed.dtype
        return isinstance(self._choose(product, rows), W8A8Library) and w8a8_by_library(weight, activations)


def space_needed(rows: int, product: Product, choice: Choice) -> tuple[int, int]:
    """Elements and tiles of `Scratch.space` that a product takes."""
    if isinstance(choice, SkinnyTuning | W8A8Tuning | DigitsTuning | RowCodesTuning):
        tiles = choice if isinstance(choice, SkinnyTuning) else choice.tiles
        return split_space_needed(rows, product.outputs, tiles, product.epilogue)
    if isinstance(choice, WideTuning):
        return wide_space_needed(rows, product.outputs, choice)
    if isinstance(choice, StreamedTuning):
        return streamed_space_needed(rows, product.outputs, choice, product.epilogue)
    return 0, 0


def run_product(out: Tensor, x: Tensor, product: Product, choice: Choice, scratch: Scratch) -> None:
    """Multiplies by a weight: x [M, K] → out [M, N] by the kernel of `choice`; what a wide or streamed
    product cannot do goes to the library.

    A quantised weight that the kernel has no code for is dequantised first.
    """
    linear, epilogue, norm = product.linear, product.epilogue, product.norm
    if isinstance(choice, GemvTuning) and has_gemv(linear.weight):
        _one_row(out, x, product, choice)
        return
    if isinstance(choice, W8A8Tuning | W8A8Library) and has_w8a8(linear.weight):
        by_codes(out, x, product, choice, scratch)
        return
    if isinstance(choice, RowCodesTuning) and has_row_codes(linear.weight, choice):
        by_row_codes(out, x, product, choice, scratch)
        return
    if isinstance(choice, DigitsTuning) and has_digits(linear.weight):
        by_digits(out, x, product, choice, scratch)
        return
    if norm is not None:
        normed = scratch.normed[: x.numel()].view(x.shape)
        norm_rows(normed, x, norm)
        x = normed
    weight = linear.weight
    if isinstance(choice, StreamedTuning) and streamed_fits(weight, x.dtype):
        streamed_product(out, x, weight, linear.bias, epilogue, choice, scratch.space)
        return
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
    """True if there is a kernel for one row times this weight."""
    if not isinstance(weight, QuantizedWeight):
        return True
    weight_format = weight.format
    return int4_gemv_fits(weight_format) or (
        weight_format.codes != "int4" and weight_format.scale_columns == 0
    )


def _one_row(out: Tensor, x: Tensor, product: Product, tuning: GemvTuning) -> None:
    weight, bias = product.linear.weight, product.linear.bias
    if isinstance(weight, QuantizedWeight) and weight.format.codes == "int4":
        int4_gemv(out, x, weight, bias, product.epilogue, product.norm, tuning)
    else:
        gemv(out, x, weight, bias, product.epilogue, product.norm, tuning)


def _by_library(out: Tensor, x: Tensor, weight: Tensor, product: Product, scratch: Scratch) -> None:
    """Multiplies by the vendor's library; `weight` [K, N]."""
    bias, epilogue = product.linear.bias, product.epilogue
    if epilogue is Epilogue.RESIDUAL:
        out.addmm_(x, weight)
        if bias is not None:
            out.add_(bias)
        return
    target = out
    if epilogue.gated:
        target = scratch.sums[: 2 * out.numel()].view(out.shape[0], -1)
    if bias is None:
        torch.mm(x, weight, out=target)
    else:
        torch.addmm(bias, x, weight, out=target)
    if epilogue.gated:
        gated_rows(out, target, epilogue)
