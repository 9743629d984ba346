"""`bench.decode experts` on a CPU with a small mixture, by Triton's interpreter."""

from __future__ import annotations

import pytest

from baton.engine.forward.layers.experts import router_tuning_of_step
from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning
from baton.engine.kernels.gpu.experts.route_rows import RouterTuning
from bench.decode import experts, router
from bench.shapes import SHAPES, Precision, Shape

SMALL = Shape(
    {
        "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "vocab_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    }
)  # fmt: skip


TUNING = GroupedTuning(columns=32, width=32, stages=2, warps=4)


@pytest.mark.parametrize(
    ("name", "rows", "quantization"), [("gate_up", 1, None), ("down", 5, None), ("down", 1, "fp8")]
)
def test_a_product_of_experts(
    name: str, rows: int, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "tunings", lambda: [TUNING])
    layer = experts.Experts(SMALL, name, Precision("fp32", quantization), "cpu")
    found, times = layer.measure(rows)
    assert (found["product"], found["rows"], found["tile_rows"]) == (name, rows, 16)
    assert found["us"] >= found["best_us"] > 0
    assert {found["columns"], found["best"]["columns"]} <= {32, 64, 128}
    assert TUNING in times
    assert len(times) == 2, "and the one that is chosen"
    if quantization is not None:
        assert found["library_us"] is None


def test_a_product_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are multiplied in tiles of the asked number of rows."""
    monkeypatch.setattr(experts, "tunings", lambda: [TUNING])
    way = experts.Way(codes=True, tile_rows=32)
    found, times = experts.Experts(SMALL, "down", Precision("bf16", "fp8"), "cpu", way).measure(9)
    assert (found["codes"], found["tile_rows"], found["columns"]) == (True, 32, 128)
    assert found["quantize_us"] > 0
    assert TUNING in times


def test_what_is_compiled_beforehand_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments that a kernel is compiled for are the launched ones, apart from addresses: fewer experts
    have the same N, K and k."""
    launched: list[tuple[object, ...]] = []

    def launch(layer: experts.Experts, draws: list[experts.Draw], *operands: object) -> None:
        _, rows, columns = layer.stack.shape
        launched.append((rows, columns, layer.top_k, draws[0].tiles.tile_rows, operands[-1]))

    monkeypatch.setattr(experts.Experts, "launch", launch)
    monkeypatch.setattr(experts, "tunings", lambda: [TUNING])
    for rows in (3, 300):
        experts.compile_tuning(SMALL, "gate_up", Precision("fp32"), (rows, TUNING), "cpu")
        experts.Experts(SMALL, "gate_up", Precision("fp32"), "cpu").measure(rows)
        beforehand, *measured = launched
        assert beforehand in measured
        launched.clear()


def test_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = router_tuning_of_step(3), RouterTuning(16, 16, 64, 2, 4)
    assert router.tunings(3)[0] == mine
    monkeypatch.setattr(router, "tunings", lambda rows: [mine, other])
    router.compile_one(SMALL, Precision("fp32"), (other, 3), "cpu")
    layer = router.Router(SMALL, Precision("fp32"), 3, "cpu", most_routers=2)
    found = layer.measure()
    assert (found["product"], found["rows"], found["chosen"]["experts"]) == ("router", 3, mine.experts)
    assert found["us"] >= found["best_us"] > 0
    assert min(found["align_us"], found["combine_us"]) > 0
    assert int(layer.taken.sum()) == 2 * 2 * 3 * 2, (
        "by two tunings, of two routers, three rows of two experts"
    )


def test_the_tuning_that_is_close_to_the_best_everywhere() -> None:
    first, second, third = (GroupedTuning(columns, 64, 2, 4) for columns in (32, 64, 128))
    times = [{first: 10.0, second: 11.0, third: 5.0}, {first: 30.0, second: 11.0}]
    ratios = [[64, 64, 2, 4, 1.483], [32, 64, 2, 4, 2.335]]
    assert experts.best_of_all(times) == ratios


def test_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "FEW", {"num_hidden_layers": 2, "vocab_size": 64})
    small = {**SHAPES["qwen3-30b-a3b"].config, **SMALL.config, "moe_intermediate_size": 32}
    found = router.Layers(Shape(small), Precision("fp32"), "cpu").measure(3)
    assert found["us"] > 0
    assert found["differing"] == 0


def test_each_row_draws_its_experts() -> None:
    drawn = experts.Experts(SMALL, "down", Precision("fp32"), "cpu").draw(6)
    assert int(drawn.ends[-1]) == 12
    assert sorted(drawn.tiles.entry[drawn.tiles.entry >= 0].tolist()) == list(range(12))
    assert 2 <= drawn.taken <= 8
