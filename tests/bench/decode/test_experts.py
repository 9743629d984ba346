"""`bench.decode experts` on a CPU with a small mixture, by Triton's interpreter."""

from __future__ import annotations

import pytest

from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning
from bench.decode import experts
from bench.shapes import Precision, Shape

SMALL = Shape(
    {
        "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "vocab_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    }
)  # fmt: skip


@pytest.mark.parametrize(("name", "rows"), [("gate_up", 1), ("down", 5)])
def test_a_product_of_experts(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = GroupedTuning(columns=32, width=32, stages=2, warps=4)
    monkeypatch.setattr(experts, "tunings", lambda: [tuning])
    found = experts.Experts(SMALL, name, Precision("fp32"), "cpu").measure(rows)
    assert (found["product"], found["rows"], found["tile_rows"]) == (name, rows, 16)
    assert found["us"] >= found["best_us"] > 0
    assert {found["columns"], found["best"]["columns"]} <= {32, 64, 128}


def test_each_row_draws_its_experts() -> None:
    drawn = experts.Experts(SMALL, "down", Precision("fp32"), "cpu").draw(6)
    assert int(drawn.ends[-1]) == 12
    assert sorted(drawn.tiles.entry[drawn.tiles.entry >= 0].tolist()) == list(range(12))
    assert 2 <= drawn.taken <= 8
