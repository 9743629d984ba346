"""A mixture in fp8 through its launches, whose rows become codes, against the reference."""

from __future__ import annotations

import pytest
import torch

from baton.engine.forward.layers.experts import ExpertsSpace, run_experts
from baton.engine.model.layers.experts import ExpertsMlp, reference_experts
from bench.engine_driver import random_model
from bench.shapes import SHAPES, Precision, Shape
from tests.engine.forced import relative_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
MIXTURE = Shape({**SHAPES["qwen3-30b-a3b"].config, **SIZES})


@pytest.mark.parametrize("rows", [2, 9, pytest.param(300, marks=pytest.mark.slow)])
def test_rows_become_codes_but_for_few_and_in_mode_exact(rows: int) -> None:
    """Two rows take as many tiles as they have experts."""
    torch.manual_seed(3)
    model = random_model(MIXTURE, Precision("bf16", "fp8"), 64, 16, DEVICE)
    mlp = model.layers[0].mlp
    assert isinstance(mlp, ExpertsMlp)
    hidden = torch.randn(rows, 128, device=DEVICE).bfloat16()
    found = []
    for exact_mode in (False, True):
        space = ExpertsSpace.of(model, rows, exact=exact_mode)
        assert space is not None
        space.present[-1] = -1
        out = hidden.clone()
        run_experts(space, mlp, out)
        assert torch.equal(out[-1], hidden[-1])
        found.append((out - hidden)[:-1].float())
    expected = reference_experts(mlp, hidden, rows - 1)[:-1].float()
    coded, exact = (relative_rms(each, expected) for each in found)
    assert exact < 0.05
    if rows == 2:
        assert coded < 0.05
    else:
        assert exact < coded < 0.12  # two roundings to e4m3, which the interpreter rounds towards zero
