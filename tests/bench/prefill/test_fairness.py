"""`bench.prefill --fairness` on a CPU with a tiny model: every load of it, and its report. And the same
loads through the real loop and scheduler, in virtual time, over an H100 by arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.memory.block_pools import BlockPools
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.perf_model.prefill_fit import LEAST_ROWS_GPU, PrefillFit
from bench.engine_driver import prompt_executor
from bench.prefill.__main__ import command_parser
from bench.prefill.fairness import (
    Fairness,
    WatchedCost,
    WatchedPass,
    by_depth,
    errors,
    one_at_a_time,
    run_alone,
    run_fairness,
)
from bench.prefill.traffic import Load, Step, StepLog, Traffic
from services.common.config.worker import EngineConfig
from tests.bench.prefill.modelled_gpu import HALF_CONTEXT, Gpu, ModelledPass, ModelledStream, VirtualTime
from tests.support.fewer import WITHOUT_THE_RULE

TINY = ("--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--json", "--fairness")


def test_the_command_reports_every_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reported = command_parser().parse_args(
        [
            *TINY,
            "--short",
            "20",
            "--long",
            "600",
            "--count",
            "12",
            "--step-ms",
            "25,8",
            "--chunk-tokens",
            "64",
        ]
    )
    run_fairness(reported, tmp_path)
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["step_ms"], second["step_ms"]) == (25.0, 8.0)
    assert first["alone_p99_ms"] == second["alone_p99_ms"] > 0
    for found in (first, second):
        assert found["counted"] >= 12
        assert found["unserved"] <= found["counted"] - 12
        assert found["long_ms"]
        assert found["ratio_p99"] == pytest.approx(found["beside_p99_ms"] / found["alone_p99_ms"], abs=0.01)
        assert sum(part["steps"] for part in found["by_depth"]) >= 600 // 64


def test_prompts_alone_for_every_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--json", "--alone")
    more = ("--prompts", "1x200,1x90", "--chunk-tokens", "64", "--step-ms", "500,1000", "--repeats", "1")
    run_alone(command_parser().parse_args([*alone, *more]), tmp_path)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["alone_step_ms"], line["tokens"]) for line in lines] == [
        (500.0, 90), (500.0, 200), (1000.0, 90), (1000.0, 200)
    ]  # fmt: skip
    assert all(sum(line["last_rows"]) == line["tokens"] for line in lines)
    assert all(line["ttft_p50_ms"] > 0 for line in lines)


def test_arrivals_are_poisson_and_the_same_again() -> None:
    load = Load(500, 4000, rate=25.0, seed=3)
    times = list(load.arrivals())
    assert times == list(load.arrivals())
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 25, rel=0.05)
    assert list(Load(500, 9, users=3).arrivals()) == [0.0] * 3


def test_errors_are_of_what_was_measured() -> None:
    steps = [Step(((0, 10),), 0.01, 0.02), Step(((90, 5), (0, 3)), 0.03, 0.02), Step(((0, 1),), 0.0, 0.02)]
    assert errors(steps) == {"step_error_p50": 50.0, "step_error_p99": 50.0, "step_error_mean": 0.0}
    shallow, deep = by_depth(steps, 100)
    assert (shallow["steps"], deep["steps"], deep["from"], deep["rows"]) == (2, 1, 80, 8)


LAYOUT = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), block_tokens=64),))


def modelled(bounds: StepBounds, gpu: Gpu, host_s: float = 4.5e-3) -> Fairness:
    """500-token prompts, beside one of 100K."""
    return Fairness(modelled_traffic(bounds, gpu, host_s), 500, 100_000, 300, seed=0)


def modelled_traffic(bounds: StepBounds, gpu: Gpu, host_s: float) -> Traffic:
    """A worker's loop and scheduler on that GPU, in virtual time."""
    time = VirtualTime()
    stream = ModelledStream(time)
    cost = WatchedCost(HALF_CONTEXT, LEAST_ROWS_GPU, lambda seconds: log.took(seconds))
    log = StepLog(cost)
    prompts = ModelledPass(stream, gpu, host_s)
    cost.begin(*prompts.timed_passes)
    pools = BlockPools(LAYOUT, [20_000])
    scheduler = PrefillScheduler(pools, bounds, max_sequences=10_000, cost=cost, clock=time.now)
    executor = prompt_executor(WatchedPass(prompts, log, time.now), scheduler, stream, time.now)
    ids = {count: (0,) * count for count in (500, 8192, 100_000)}
    return Traffic(executor, log, time, ids.__getitem__)


def worker_bounds() -> StepBounds:
    """A worker's own, on a GPU."""
    config = EngineConfig()
    return StepBounds(
        config.chunk_tokens_on("cuda"),
        config.prefill_step_ms / 1e3,
        config.prefill_age_cap_ms / 1e3,
        256,
        config.prefill_alone_step_ms_on("cuda") / 1e3,
    )


def run_modelled(bounds: StepBounds, gpu: Gpu | None = None) -> dict[str, Any]:
    fair = modelled(bounds, gpu or Gpu())
    alone = fair.alone()
    return alone | fair.beside(alone)


@WITHOUT_THE_RULE
def test_a_long_prompt_at_most_doubles_the_wait_of_short_ones_on_an_h100_by_arithmetic(ablated: bool) -> None:
    """Waits of short prompts under a worker's own bounds, and what the long prompt pays for them."""
    bounds = worker_bounds()
    found = run_modelled(bounds)
    assert found["ratio_p99"] <= 1.7, found
    assert found["step_error_p50"] <= 2
    assert found["long_ratio"] <= 2.2, "of its time alone, in long steps"
    if not ablated:
        return
    unbounded = run_modelled(replace(bounds, seconds=1.0))
    assert unbounded["ratio_p99"] > 2, "it is the bound in time that does it"


def test_too_low_an_estimate_of_attention_does_not_last() -> None:
    """Chunks of few rows beside short prompts, whose attention takes twice as long a key as that of the wide
    chunks it was learned from."""
    gpu, bounds = Gpu(few_rows=2.0), StepBounds(2048, 0.025, 2.0, 256, 0.05)
    traffic = modelled_traffic(bounds, gpu, 4.5e-3)
    fair = Fairness(traffic, 500, 100_000, 300, seed=0)
    alone = fair.alone()
    cost = traffic.cost
    for _ in range(9):
        PrefillFit.took(cost, [(80_000, 1024)], cost.unit_s * 1024 * 1.5)
    assert cost.attention < 0.8
    found = fair.beside(alone)
    assert found["ratio_p99"] <= 2, found
    assert found["cost"]["attention_slowness"] > 2


@pytest.mark.parametrize("step_s", [1.1e-3, 2.4e-3])
def test_a_long_prompt_alone_takes_little_more_than_in_one_step(step_s: float) -> None:
    """One after the other, each soon after the one before, as by `bench.prefill --alone`."""

    def alone(bounds: StepBounds) -> dict[str, Any]:
        return one_at_a_time(modelled_traffic(bounds, Gpu(step_s=step_s), 1.4e-3), 8192, 3)

    one_step = alone(StepBounds(8192, 1.0, 2.0, 256))["ttft_p50_ms"]
    found = alone(worker_bounds())
    assert found["last_rows"] == [2048] * 4, "no fifth step for what the bound cuts off"
    assert found["ttft_p50_ms"] < 1.06 * one_step
    assert alone(replace(worker_bounds(), alone_seconds=0.0125))["ttft_p50_ms"] > 1.1 * one_step


@WITHOUT_THE_RULE
def test_short_prompts_that_come_seldom_wait_little_for_the_steps_of_long_ones(ablated: bool) -> None:
    """Three a second, beside prompts of 8,192 tokens one after the other."""
    traffic = modelled_traffic(worker_bounds(), Gpu(step_s=2.4e-3), 1.4e-3)
    alone, beside = (
        np.percentile(traffic.run(Load(500, 60, rate=3.0, long=long, seed=1)).short, 99) for long in (0, 8192)
    )
    assert beside <= 2 * alone
    if not ablated:
        return
    unbounded = modelled_traffic(replace(worker_bounds(), seconds=1.0), Gpu(step_s=2.4e-3), 1.4e-3)
    assert np.percentile(unbounded.run(Load(500, 60, rate=3.0, long=8192, seed=1)).short, 99) > 2 * alone


def test_a_host_that_is_slower_than_the_gpu_starves_no_prompt() -> None:
    """Steps of few rows then take as long as those of many, which must not make every row look dear."""
    fair = modelled(StepBounds(2048, 0.025, 2.0, 256), Gpu(), host_s=0.0168)
    alone = fair.alone()
    found = fair.beside(alone)
    assert found["beside_max_ms"] < 1000, found
    assert found["long_ms"]


@pytest.mark.slow
def test_keys_that_are_not_split_over_programs_are_what_a_long_prompt_would_die_of() -> None:
    bounds = StepBounds(2048, 0.025, 2.0, 256)
    split, whole = (modelled(bounds, Gpu(splits)).alone() for splits in (True, False))
    assert whole["long_alone_ms"] > 2 * split["long_alone_ms"]
