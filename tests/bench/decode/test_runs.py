"""The drivers of `bench.decode` on a CPU with a tiny model, so that no path of theirs rots unseen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.kernels.gpu.attention.items import AttentionTuning
from baton.engine.model.modules import Model
from baton.engine.parallel.exchange import ExchangeTimeoutError
from bench.case import SAMPLINGS, DecodeCase, EngineSize
from bench.decode import budget, churn, mixed, steady
from bench.decode.attention import PlainRun
from bench.decode.churn_plan import Join, engine_size
from bench.decode.engine import DecodeEngine
from bench.decode.front import Front
from bench.shapes import SHAPES, Precision, Shape
from tests.engine.parallel.turns import TurnGroup
from tests.kvtransfer.support.fake_device import FakeDevice, Pump

FRONT = partial(Front, streams=True, burners=1)


def tiny(batch: int, sampling: str = "greedy", context: int = 100) -> DecodeCase:
    return DecodeCase("tiny", Precision("fp32"), batch, context, sampling, "exact")


def accounting_is_consistent(engine: DecodeEngine) -> None:
    assert engine.slots.free == engine.size.slots
    assert engine.model.pools.free == engine.model.pools.total
    engine.model.pools.check_integrity([])


def test_churn() -> None:
    case = tiny(4)
    engine = DecodeEngine(case, engine_size([case]), FRONT, device="cpu")
    for doubled in range(8):  # a busy machine has too few steps in so short a time for all that to happen
        begun = time.monotonic()
        found = churn.run(engine, case, 0.25 * 2**doubled, FakeDevice(Pump(None)))
        if found["block_grants"] and found["joins"] > 2 and found["ended"]:
            break
    lasted_ms = (time.monotonic() - begun) * 1e3
    accounting_is_consistent(engine)
    closed = engine.close()
    assert found["joins"] > 2
    assert found["ended"] > 0
    assert found["block_grants"] > 0
    assert 0 < found["longest_ms"]["step"] < lasted_ms
    assert found["scattered_mb_s"] > 0
    assert 1 < found["mean_rows"] <= engine.size.slots
    assert found["stalled_rows"] == 0
    assert closed["tokens_consumed"] == closed["tokens_streamed"] > found["steps"] * found["mean_rows"]
    assert closed["messages_consumed"] > 0


def test_churn_cancels_and_asks_for_all_a_sampler_can() -> None:
    case = tiny(2)
    engine = DecodeEngine(case, engine_size([case]), Front, device="cpu")
    driver = churn.Churn(engine, tiny(2, "logprobs"), FakeDevice(Pump(None)))
    driver.fill([Join(1, 0.0, 200, 3), Join(2, 0.0, 5, None)])
    until = time.monotonic() + 30
    while driver.counts.ended < 2 and time.monotonic() < until:
        driver.turn()
    assert (driver.counts.joins, driver.counts.cancels, driver.counts.ended) == (2, 1, 2)
    accounting_is_consistent(engine)
    engine.close()


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_a_steady_window(sampling: str) -> None:
    """Every admitted sequence is freed again; plain torch keeps no step clocks, so nothing is found."""
    case, called = tiny(2, sampling), []
    engine = DecodeEngine(case, EngineSize(2, 100 + 60), Front, device="cpu")
    engine.first_token(case)
    found = steady.run_seconds(engine, case, 0.01, at_end=lambda: called.append(len(engine.holds)))
    assert found == {}
    assert called == [2]
    accounting_is_consistent(engine)
    engine.close()


def test_a_front_that_loses_tokens_is_found_out() -> None:
    case = tiny(1)
    engine = DecodeEngine(case, EngineSize(1, 120), FRONT, device="cpu")
    engine.first_token(case)
    follower = engine.front.follower
    assert follower is not None
    follower.kill()
    with pytest.raises(RuntimeError, match="ended with"):
        engine.close()


@pytest.mark.parametrize(
    ("rows", "accept", "tokens"),
    [
        (2, 1.0, 2.0),
        pytest.param(4, 1.0, 4.0, marks=pytest.mark.slow),
        pytest.param(4, 0.0, 1.0, marks=pytest.mark.slow),
    ],
)
def test_steps_with_drafts(rows: int, accept: float, tokens: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model counts up, so that drafts which count up are right."""
    monkeypatch.setattr(steady, "FIRST", 1)
    case = replace(tiny(2, context=20), rows_per_slot=rows, accept=accept, numerics="fast")
    size = EngineSize(2, 60, rows_per_slot=rows, accepts=True)
    engine = DecodeEngine(case, size, Front, device="cpu", interpreted=True)
    found = steady.run_drafts(engine, case, 4)
    accounting_is_consistent(engine)
    engine.close()
    assert found["rows"] == 2 * rows
    assert found["steps"] > 1
    # The first step behind an admission has no drafts.
    assert tokens - 1 < found["tokens_a_step"] <= tokens
    with pytest.raises(ValueError, match="not 6"):
        steady.run_drafts(engine, replace(case, rows_per_slot=3))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "least", "most"), [(1, 1, 1), (4, 1.3, 4)])
@pytest.mark.parametrize("table_mb", [0, 1])
def test_text_that_repeats_itself(
    rows: int, least: float, most: float, table_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a lookahead table, and one that learns meanwhile."""
    monkeypatch.setattr(steady, "FIRST", 1)
    ends = 10.0 if table_mb and rows > 1 else 0.0
    case = replace(tiny(2, context=100), rows_per_slot=rows, text="markov:0.95", ends=ends)
    size = EngineSize(2, 200, rows_per_slot=rows, chance=case.chance, lookahead_mb=table_mb)
    engine = DecodeEngine(case, size, Front, device="cpu", interpreted=True)
    found = steady.run_text(engine, case, 8)
    accounting_is_consistent(engine)
    assert engine.learner is None or engine.learner.learned > 1
    engine.close()
    assert least <= found["tokens_a_step"] <= most
    assert found["drafts_a_step"] <= rows - 1


def test_several_devices() -> None:
    """Each reads its part, and the model's blocks are those of all heads."""
    case = replace(tiny(2, context=20), tensor_parallel=2)
    engine = DecodeEngine(case, EngineSize(2, 40), Front, device="cpu", interpreted=True, group=TurnGroup)
    keys = [engine.admit(case, index, 4) for index in range(2)]
    assert len(keys) == 2
    engine.turn_until(lambda: engine.loop.tokens_decoded >= 6)
    engine.empty()
    accounting_is_consistent(engine)
    engine.close()
    one = DecodeEngine(tiny(2, context=20), EngineSize(2, 40), Front, device="cpu")
    one.close()
    assert engine.model.layout == one.model.layout
    assert case.floor_ms(20, 1e12) * 2 == pytest.approx(tiny(2).floor_ms(20, 1e12))


@pytest.mark.slow
def test_the_cost_of_dividing_a_model_is_measured_without_a_trace() -> None:
    case = replace(tiny(2, context=20), tensor_parallel=2)
    engine = DecodeEngine(case, EngineSize(2, 40), Front, device="cpu", interpreted=True, group=TurnGroup)
    cost = budget.split_cost(engine, case, once, joined=2)
    assert set(cost) == {"all_devices_ms", "alone_ms", "attention_ms", "exchange_ms"}
    accounting_is_consistent(engine)
    engine.close()


def test_a_run_whose_exchange_fails_ends_at_once() -> None:
    case, made = replace(tiny(1, context=20), tensor_parallel=2), list[TurnGroup]()

    def group(ranks: Sequence[Model], rows: int) -> TurnGroup:
        made.append(TurnGroup(ranks, rows))
        return made[-1]

    engine = DecodeEngine(case, EngineSize(1, 40), Front, device="cpu", interpreted=True, group=group)
    engine.admit(case, 0, 4)
    made[0].whole.zero_()
    with pytest.raises(ExchangeTimeoutError):
        engine.turn_until(lambda: not engine.holds, deadline_s=10.0)
    engine.close()


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> DecodeCase:
    """Two sequences of a small mixture, of eight experts of which a row takes two."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    monkeypatch.setitem(SHAPES, "mixture", Shape({**SHAPES["tiny"].config, **experts, **family}))
    return replace(tiny(2, context=20), shape="mixture")


def test_the_experts_that_a_step_reads_are_counted(mixture: DecodeCase) -> None:
    engine = DecodeEngine(mixture, EngineSize.steady([mixture], None), Front, device="cpu")
    found = steady.experts_read(engine, mixture)
    assert found["experts_expected"] == 3.5
    assert 2 <= found["experts_a_layer"] <= 4
    accounting_is_consistent(engine)
    engine.close()


def test_rows_whose_logits_are_no_numbers_are_counted() -> None:
    logits = torch.zeros(5, 3)
    logits[1, 2], logits[3], logits[4, 0] = torch.nan, torch.inf, torch.nan
    step = SimpleNamespace(pass_=SimpleNamespace(logits=logits))
    engine: Any = SimpleNamespace(loop=SimpleNamespace(step_state=step))
    assert [steady.rows_not_numbers(engine, rows) for rows in (1, 4, 5)] == [0, 2, 3]


@pytest.mark.slow
def test_the_budget_of_a_mixture(mixture: DecodeCase) -> None:
    engine = DecodeEngine(mixture, EngineSize(2, 40), Front, device="cpu", interpreted=True)
    engine.admit(mixture, 0, 12)
    engine.turn_until(lambda: engine.loop.tokens_decoded >= 3)
    parts = budget.launches(engine, mixture)
    assert set(parts) == {"qkv", "output", "head", "attention", "experts", "front"}
    parts["experts"]()
    engine.empty()
    engine.close()


def once(launch: Callable[[], None]) -> float:
    """Runs a part of a step, whose time it makes up."""
    launch()
    return 1.0


@pytest.mark.slow
def test_by_graphs_in_the_interpreter() -> None:
    """Clocks come over, and each part of the budget can be run again without a trace."""
    case, times = tiny(2, context=20), []
    engine = DecodeEngine(case, EngineSize(2, 40), Front, device="cpu", interpreted=True)
    reader = engine.clocks()
    assert reader is not None
    for index in range(2):
        engine.admit(case, index, 12)
    engine.turn_until(lambda: engine.loop.tokens_decoded >= 6)
    ring, steps = engine.loop.ring, engine.ended_steps

    def timed(launch: Callable[[], None]) -> float:
        times.append(launch)
        return once(launch)

    parts = budget.measure(engine, case, timed)
    assert set(parts) == {"qkv", "output", "gate_up", "down", "head", "attention", "front"}
    assert len(times) == 7
    assert engine.ended_steps == steps
    engine.turn_until(lambda: not engine.holds)
    lines = reader.finish(engine.ended_steps)
    assert len(lines) == engine.ended_steps - reader.first
    assert lines[:, 3].max() == 2
    assert lines[:, 3].sum() == engine.loop.tokens_decoded == 2 * 11
    assert ring.full_steps == ring.stalled_rows == 0
    accounting_is_consistent(engine)
    engine.close()


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_attention_alone(kv_dtype: str) -> None:
    chosen, tuned = PlainRun(
        "tiny", Precision("fp32", kv_dtype=kv_dtype), 2, 130, "cpu", cut=(3, 64), layers=1
    ).measure([AttentionTuning(4, 2)])
    assert (chosen["chosen"], chosen["rows"], chosen["context"], chosen["programs"]) == (True, 2, 130, 3)
    assert chosen["shortest"] == 64
    assert (tuned["warps"], tuned["stages"]) == (4, 2)
    assert tuned["us"] > 0


@pytest.mark.slow
def test_mixed_steps() -> None:
    case, rows = tiny(2, context=8), [16]
    size = mixed.engine_size([case], rows)
    engine = DecodeEngine(case, size, Front, device="cpu", interpreted=True, mixes=True)
    (found,) = mixed.run(engine, [case], rows, warm=0, count=1)
    accounting_is_consistent(engine)
    engine.close()
    assert found["uncaptured"] == ""
    assert found["decode_ms"] > 0
    assert found["16_rows"]["prefill_ms"] > 0
    assert found["16_rows"]["mixed_ms"] > 0
