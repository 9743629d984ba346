"""Launches of a mixture begin early where each entry is a tile, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.forward.layers import experts
from baton.engine.forward.layers.experts import ExpertsSpace, run_experts
from baton.engine.model.layers.experts import ExpertsMlp
from bench.engine_driver import random_model
from bench.shapes import SHAPES, Precision, Shape

SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip


@pytest.mark.parametrize(("rows", "exact", "early"), [(2, False, True), (3, False, False), (2, True, False)])
def test_launches_begin_early_where_each_entry_is_a_tile(
    rows: int, exact: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape({**SHAPES["qwen3-30b-a3b"].config, **SIZES})
    model = random_model(shape, Precision("fp32"), 64, 16, "cpu")
    space, mlp = ExpertsSpace.of(model, rows, exact=exact), model.layers[0].mlp
    assert space is not None
    assert isinstance(mlp, ExpertsMlp)
    passed: list[bool] = []
    for name in ("route_rows", "align_rows", "grouped_linear", "combine_rows"):

        def launch(*_: object, early: bool, **__: Any) -> None:
            passed.append(early)

        monkeypatch.setattr(experts, name, launch)
    run_experts(space, mlp, torch.zeros(rows, 64))
    assert passed == [early] * 4
