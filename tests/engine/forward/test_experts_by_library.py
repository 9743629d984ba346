"""A mixture of many rows, whose `down` is the library's grouped product, against this project's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.forward.layers import experts
from baton.engine.forward.layers.experts import ExpertsSpace, run_experts
from baton.engine.kernels.gpu.experts.library_product import library_multiplies, product_by_library
from baton.engine.kernels.weight_stack import WeightStack
from baton.engine.model.layers.experts import ExpertsMlp
from bench.engine_driver import random_model
from bench.shapes import SHAPES, Precision, Shape
from tests.engine.forced import relative_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "num_experts": 12, "num_experts_per_tok": 3,
}  # fmt: skip
MIXTURE = Shape({**SHAPES["qwen3-30b-a3b"].config, **SIZES})


def space_and_mixture(
    rows: int, *, exact: bool = False, dtype: str = "bf16"
) -> tuple[ExpertsSpace, ExpertsMlp]:
    torch.manual_seed(3)
    model = random_model(MIXTURE, Precision(dtype), 64, 16, DEVICE)
    space, mlp = ExpertsSpace.of(model, rows, exact=exact), model.layers[0].mlp
    assert space is not None
    assert isinstance(mlp, ExpertsMlp)
    return space, mlp


def added(hidden: Tensor) -> Tensor:
    """Adds the mixture to rows, the last three of which hold no token. Nothing is used of places without an
    entry, whatever they hold."""
    space, mlp = space_and_mixture(40)
    space.inner.fill_(torch.nan)
    space.present[len(hidden) - 3 : len(hidden)] = -1
    out = hidden.clone()
    run_experts(space, mlp, out)
    assert torch.equal(out[-3:], hidden[-3:])
    return (out - hidden).float()


@pytest.mark.parametrize("rows", [40, 24, 19])
def test_many_rows_have_the_librarys_product_and_fewer_their_own(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(rows, 128, generator=torch.Generator().manual_seed(5)).to(DEVICE).bfloat16()
    expected = added(hidden)
    shapes = []

    def product(x: Tensor, stack: WeightStack, ends: Tensor) -> Tensor:
        shapes.append(stack.shape)
        return product_by_library(x, stack, ends)

    monkeypatch.setattr(experts, "product_by_library", product)
    monkeypatch.setattr(experts, "LIBRARY_ROWS", 20)
    assert relative_rms(added(hidden), expected) < 0.02
    assert shapes == ([(12, 128, 64)] if rows >= 20 else [])


def test_the_library_has_no_rows_of_mode_exact_nor_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "LIBRARY_ROWS", 20)
    for space, _ in (space_and_mixture(40, exact=True), space_and_mixture(40, dtype="fp32")):
        assert space.places is None
        assert len(space.results) == 40 * 3


def test_the_library_has_no_experts_whose_rows_are_not_aligned() -> None:
    for rows, columns, known in ((64, 32, True), (60, 32, False), (64, 36, False)):
        stack = WeightStack(torch.zeros(2 * rows, columns, dtype=torch.bfloat16), 2)
        assert library_multiplies(stack) == known
