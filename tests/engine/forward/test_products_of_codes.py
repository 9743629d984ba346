"""Products in which codes of activations are multiplied by codes of weights. Rows become codes by torch here:
Triton's interpreter rounds to e4m3 and to bfloat16 in its own way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.forward.layers import linear as gemm
from baton.engine.forward.layers.linear import run_product, space_needed
from baton.engine.forward.layers.mlp import run_dense_mlp
from baton.engine.forward.products import code_products
from baton.engine.forward.products.scratch import Scratch
from baton.engine.gemm_dispatch.choice import (
    Choice,
    DigitsTuning,
    RowCodesTuning,
    W8A8Library,
    W8A8Tuning,
)
from baton.engine.kernels.fusion import Epilogue, Norm
from baton.engine.kernels.reference.row_ops import gated, rms_norm
from baton.engine.kernels.weight_format import FORMATS, WeightFormat
from baton.engine.model.config.model_config import LayerNorms
from baton.engine.model.layers.linear import Linear, Product
from baton.engine.model.layers.mlp import DenseMlp
from baton.engine.model.layers.residual import Residual
from baton.engine.model.quantization.quantize import quantize
from tests.engine.kernels.gpu.gemm.test_gpu_gemm import DEVICE, normal, reference
from tests.support.fewer import each_value_once

FP8, INT8 = WeightFormat("fp8"), WeightFormat("int8")
ROWS, WIDTH, INNER = 17, 64, 96
# Roundings to bfloat16: of sums before and after they are scaled, of the gate, of the result.
CLOSE = 2**-5


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(codes: Tensor, scales: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        normed = x if norm is None else rms_norm(x, norm.gain, norm.eps)
        found = quantize(normed, FP8 if codes.dtype == torch.float8_e4m3fn else INT8)
        codes.copy_(found.codes)
        scales.copy_(found.scales[:, 0])

    def gated_rows(
        codes: Tensor,
        scales: Tensor,
        gate_up: Tensor,
        epilogue: Epilogue,
        operands: tuple[Tensor, Tensor] | None,
    ) -> None:
        sums = gate_up if operands is None else gate_up * operands[0][:, None] * operands[1].view(-1)
        rows(codes, scales, gated(sums.to(gate_up.dtype), epilogue))

    def digits(found: Tensor, scales: Tensor, x: Tensor, norm: Norm | None = None) -> None:
        normed = (x if norm is None else rms_norm(x, norm.gain, norm.eps)).float()
        scales.copy_(normed.abs().amax(-1) / 16319)
        number = (normed / scales[:, None]).round()
        high = ((number + 64) / 128).floor()
        found.copy_(torch.stack((high, number - 128 * high)))

    monkeypatch.setattr(code_products, "quantize_rows", rows)
    monkeypatch.setattr(code_products, "quantize_digits", digits)
    monkeypatch.setattr(code_products, "quantize_gated_rows", gated_rows)


@pytest.fixture(params=[2, 512], ids=["scaled by the library", "scaled afterwards"])
def unscaled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_products, "MOST_UNSCALED_ROWS", request.param)


def scratch(product: Product, choice: Choice) -> Scratch:
    space = space_needed(ROWS, product, choice)
    return Scratch(
        ROWS, WIDTH, 2 * INNER * ROWS, space, torch.device(DEVICE), torch.bfloat16, codes=2 * INNER
    )


CHOICES: dict[str, tuple[WeightFormat, Choice]] = {
    "library": (FP8, W8A8Library()),
    "tiles": (INT8, W8A8Tuning(16, 64, 64, 2, 2, 4)),
    "digits": (FORMATS["int4"], DigitsTuning(16, 64, 2, 2, 4)),
    "on the way": (INT8, RowCodesTuning(16, 64, 64, 1, 2, 4)),
    "on the way, in splits": (INT8, RowCodesTuning(16, 64, 32, 2, 2, 4)),
}


@pytest.mark.usefixtures("unscaled")
@pytest.mark.parametrize(
    ("name", "epilogue", "bias"),
    each_value_once(list(CHOICES), list(Epilogue), [False, True]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_product(name: str, epilogue: Epilogue, bias: bool) -> None:
    weight_format, choice = CHOICES[name]
    double = 2 if epilogue.gated else 1
    weight = quantize(normal(double * INNER, WIDTH, seed=1) / 8, weight_format)
    b = normal(double * INNER, seed=2).bfloat16() if bias else None
    norm = Norm(normal(WIDTH, seed=3).bfloat16(), 1e-5)
    product = Product("", Linear(weight, b), epilogue, norm)
    x, out = normal(ROWS, WIDTH, seed=4).bfloat16(), normal(ROWS, INNER, seed=5).bfloat16()
    codes = rms_norm(x, norm.gain, norm.eps).float()
    if weight_format.codes != "int4":  # as good as no rounding
        codes = quantize(codes, weight_format).dequantized(torch.float32)
    expected = reference(codes, weight.dequantized(torch.float32), b, epilogue, out)
    run_product(out, x, product, choice, scratch(product, choice))
    # Scales of tiles are not those of rows, so codes differ by roundings.
    close = 3 * CLOSE if isinstance(choice, RowCodesTuning) else CLOSE
    torch.testing.assert_close(out.float(), expected, rtol=close, atol=close)


@pytest.mark.usefixtures("unscaled")
@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, Epilogue.RESIDUAL], ids=lambda epilogue: epilogue.name)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_more_results_than_gate_and_up_has_room_for_their_sums(
    bias: bool, epilogue: Epilogue
) -> None:
    """The product is that of a quantised head."""
    norm, many = Norm(normal(WIDTH, seed=3).bfloat16(), 1e-5), 5 * INNER
    weights = [quantize(normal(rows, WIDTH, seed=1) / 8, FP8) for rows in (2 * INNER, many)]
    b = normal(many, seed=2).bfloat16() if bias else None
    gate_up = Product("gate_up", Linear(weights[0], None), Epilogue.SWIGLU, norm)
    product = Product("head", Linear(weights[1], b), epilogue, norm)
    precision = SimpleNamespace(activations=torch.bfloat16)
    model: Any = SimpleNamespace(
        product_kinds=lambda: [gate_up, product],
        config=SimpleNamespace(layer_norms=LayerNorms()),
        device=torch.device(DEVICE),
        precision=precision,
    )
    x, out = normal(ROWS, WIDTH, seed=4).bfloat16(), normal(ROWS, many, seed=5).bfloat16()
    codes = quantize(rms_norm(x, norm.gain, norm.eps).float(), FP8).dequantized(torch.float32)
    expected = reference(codes, weights[1].dequantized(torch.float32), b, epilogue, out)
    gemm.Gemm(model, [ROWS], lambda *_: W8A8Library())(product, out, x)
    torch.testing.assert_close(out.float(), expected, rtol=CLOSE, atol=CLOSE)


class Part:
    """A `RankExchange` of one rank, which has its part alone, and adds it. `coded`: whether the last sum's
    norm was codes."""

    coded = False

    def __init__(self) -> None:
        self.parts = torch.full((3 * ROWS, WIDTH), torch.nan, dtype=torch.bfloat16, device=DEVICE)

    def part(self, rows: int) -> Tensor:
        return self.parts[ROWS : ROWS + rows]

    def reduce(
        self,
        hidden: Tensor,
        post_norm: Norm | None,
        norm: tuple[Norm, Tensor] | None,
        scales: Tensor | None = None,
    ) -> None:
        hidden.add_(self.part(len(hidden)))
        assert norm is not None
        normed = rms_norm(hidden, norm[0].gain, norm[0].eps)
        self.coded = scales is not None
        if scales is not None:
            found = quantize(normed, FP8)
            normed = found.codes
            scales.copy_(found.scales[:, 0])
        norm[1].copy_(normed)


@pytest.mark.usefixtures("unscaled")
@pytest.mark.parametrize(
    "choice",
    [W8A8Library(), W8A8Tuning(16, 64, 64, 2, 2, 4), RowCodesTuning(16, 64, 32, 2, 2, 4)],
    ids=["library", "tiles", "on the way"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_yields_its_part_of_a_sum(choice: Choice, rank: int) -> None:
    """The part is the sum over the rank's columns alone, whose codes have scales of their own; the bias is
    the first rank's. The product behind it takes the rows that the exchange has normed, as codes where it
    multiplies codes."""
    columns = range(rank * INNER // 2, (rank + 1) * INNER // 2)
    whole = quantize(normal(WIDTH, INNER, seed=1) / 8, FP8)
    down_weight, head_weight = (
        whole.part([range(WIDTH)], columns),
        quantize(normal(INNER, WIDTH, seed=7) / 8, FP8),
    )
    bias = normal(WIDTH, seed=2).bfloat16() if rank == 0 else None
    norm, residual = Norm(normal(WIDTH, seed=3).bfloat16(), 1e-5), Residual(divided=True)
    down = Product("down", Linear(down_weight, bias), residual.epilogue)
    following = Product("qkv", Linear(head_weight, None), norm=norm)
    model: Any = SimpleNamespace(
        product_kinds=lambda: [down, following],
        config=SimpleNamespace(layer_norms=LayerNorms()),
        device=torch.device(DEVICE),
        precision=SimpleNamespace(activations=torch.bfloat16),
    )
    exchange: Any = Part()
    products = gemm.Gemm(model, [ROWS], lambda *_: choice, exchange)
    hidden, out = normal(ROWS, WIDTH, seed=4).bfloat16(), normal(ROWS, INNER, seed=5).bfloat16()
    before, x = (
        hidden.clone(),
        normal(ROWS, INNER, seed=6).bfloat16()[:, columns.start : columns.stop].contiguous(),
    )
    products.add(residual, down, hidden, x, following)
    assert exchange.coded == (not isinstance(choice, RowCodesTuning))
    again, kept = products.norm(hidden, norm), hidden.clone()
    products.add(residual, down, hidden.copy_(before), x, following)
    products(following, out, hidden)

    codes = quantize(x.float(), FP8).dequantized(torch.float32)
    part = reference(codes, down_weight.dequantized(torch.float32), bias, Epilogue.PLAIN, before)
    assert_like(exchange.part(ROWS), part)
    assert exchange.parts[:ROWS].isnan().all()
    assert exchange.parts[2 * ROWS :].isnan().all()
    assert hidden.equal(kept)
    normed = rms_norm(hidden, norm.gain, norm.eps).float()
    assert_like(again, normed)
    normed = quantize(normed, FP8).dequantized(torch.float32)
    assert_like(out, reference(normed, head_weight.dequantized(torch.float32), None, Epilogue.PLAIN, out))


def assert_like(found: Tensor, expected: Tensor) -> None:
    """Asserts that two results are as near as codes of e4m3 are whose scales are of tiles or of rows."""
    error = (found.float() - expected).square().mean() / expected.square().mean()
    assert float(error) < 0.1**2


@pytest.mark.usefixtures("unscaled")
def test_a_feed_forward_block() -> None:
    gate_up, down = (
        quantize(normal(*shape, seed=seed) / 8, FP8)
        for seed, shape in enumerate([(2 * INNER, WIDTH), (WIDTH, INNER)])
    )
    norm = Norm(normal(WIDTH, seed=3).bfloat16(), 1e-5)
    mlp = DenseMlp(
        Product("gate_up", Linear(gate_up, None), Epilogue.SWIGLU, norm),
        Product("down", Linear(down, None), Epilogue.RESIDUAL),
        Residual(),
    )
    hidden = normal(ROWS, WIDTH, seed=4).bfloat16()
    results: list[Tensor] = []
    for one in (True, False):
        found, inner = hidden.clone(), torch.zeros(ROWS, INNER, dtype=torch.bfloat16, device=DEVICE)
        model: Any = SimpleNamespace(
            product_kinds=lambda: [mlp.gate_up, mlp.down],
            config=SimpleNamespace(layer_norms=LayerNorms()),
            device=torch.device(DEVICE),
            precision=SimpleNamespace(activations=torch.bfloat16),
        )
        products = gemm.Gemm(model, [ROWS], lambda *_: W8A8Library())
        if one:
            run_dense_mlp(products, mlp, found, inner)
            assert not inner.any()  # the gated activation has been codes only
        else:
            products(mlp.gate_up, inner, found)
            products(mlp.down, found, inner)
        results.append(found.float())
    # A rounding before codes are chosen changes some by one, so elements differ, but little as a whole.
    added = results[1] - hidden.float()
    assert float((results[0] - results[1]).square().mean() / added.square().mean()) < 0.04**2
