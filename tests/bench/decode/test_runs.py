"""The drivers of `bench.decode` on a CPU with a tiny model, so that no path of theirs rots unseen."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from baton.engine.kernels.gpu.attention.items import AttentionTuning
from bench.decode import budget, churn, mixed, steady
from bench.decode.attention import Bench
from bench.decode.case import SAMPLINGS, Case, EngineSize
from bench.decode.churn_plan import Join, engine_size
from bench.decode.engine import DecodeEngine
from bench.decode.front import Front
from bench.decode.scatter import StagedScatter
from bench.precision import Precision
from tests.kvtransfer.support.fake_device import FakeDevice, Pump

FRONT = partial(Front, streams=True, burners=1)


def tiny(batch: int, sampling: str = "greedy", context: int = 100) -> Case:
    return Case("tiny", Precision("fp32"), batch, context, sampling, "exact")


def accounting_is_consistent(engine: DecodeEngine) -> None:
    assert engine.slots.free == engine.size.slots
    assert engine.model.pools.free == engine.model.pools.total
    engine.model.pools.check_integrity([])


@pytest.mark.parametrize(
    "scatter", ["staged", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pinned", "pieces"))]
)
def test_churn(scatter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = partial(StagedScatter, device=FakeDevice(Pump(None)))
    monkeypatch.setitem(churn.SCATTERS, "staged", fake)
    case = tiny(4)
    engine = DecodeEngine(case, engine_size([case]), FRONT, device="cpu")
    for _ in range(5):  # a busy machine may have too few steps in half a second for all that to happen
        begun = time.monotonic()
        found = churn.run(engine, case, 0.5, scatter)
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
    driver = churn.Churn(engine, tiny(2, "logprobs"), "pinned")
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
    assert engine.started.first_token_s > 0
    found = steady.run_seconds(engine, case, 0.01, at_end=lambda: called.append(len(engine.holds)))
    assert found == {}
    assert called == [2]
    accounting_is_consistent(engine)
    engine.close()


def test_a_front_that_loses_tokens_is_found_out() -> None:
    case = tiny(1)
    engine = DecodeEngine(case, EngineSize(1, 120), FRONT, device="cpu")
    engine.first_token(case)
    follower = engine.front._follower
    assert follower is not None
    follower.kill()
    with pytest.raises(RuntimeError, match="ended with"):
        engine.close()


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

    def once(launch: Callable[[], None]) -> float:
        launch()
        times.append(launch)
        return 1.0

    parts = budget.measure(engine, case, once)
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


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_attention_alone(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.decode.attention.tunings", lambda: [AttentionTuning(4, 2)])
    monkeypatch.setattr("bench.decode.attention._LAYERS", 1)
    chosen, tuned = Bench("tiny", Precision("fp32", kv_dtype=kv_dtype), 2, 130, "cpu", programs=3).measure()
    assert (chosen["chosen"], chosen["rows"], chosen["context"], chosen["programs"]) == (True, 2, 130, 3)
    assert (tuned["warps"], tuned["stages"]) == (4, 2)
    assert tuned["us"] > 0


@pytest.mark.slow
def test_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "_WARM", 0)
    monkeypatch.setattr(mixed, "_COUNT", 1)
    case, rows = tiny(2, context=8), [16]
    size = mixed.engine_size([case], rows)
    engine = DecodeEngine(case, size, Front, device="cpu", interpreted=True, mixes=True)
    (found,) = mixed.run(engine, [case], rows)
    accounting_is_consistent(engine)
    engine.close()
    assert found["uncaptured"] == ""
    assert found["decode_ms"] > 0
    assert found["16_rows"]["prefill_ms"] > 0
    assert found["16_rows"]["mixed_ms"] > 0
