"""Launches of a mixture begin early where entries are computed one by one, and only there."""

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


ENTRIES = ["route_rows", "gate_up_entries", "add_down_entries"]
TILES = ["route_rows", "grouped_linear", "grouped_linear", "combine_rows"]


@pytest.mark.parametrize(
    ("rows", "exact", "launches"), [(2, False, ENTRIES), (3, False, TILES), (2, True, TILES)]
)
def test_launches_begin_early_where_entries_are_computed_one_by_one(
    rows: int, exact: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape({**SHAPES["qwen3-30b-a3b"].config, **SIZES})
    model = random_model(shape, Precision("fp32"), 64, 16, "cpu")
    space, mlp = ExpertsSpace.of(model, rows, exact=exact), model.layers[0].mlp
    assert space is not None
    assert isinstance(mlp, ExpertsMlp)
    passed: list[tuple[str, bool]] = []
    for name in {*ENTRIES, *TILES, "align_rows"}:

        def launch(*_: object, early: bool, name: str = name, **__: Any) -> None:
            passed.append((name, early))

        monkeypatch.setattr(experts, name, launch)
    run_experts(space, mlp, torch.zeros(rows, 64))
    assert passed == [(name, launches is ENTRIES) for name in launches]
