"""Worker counts: the fewest that are enough, what bounds them, and what was measured on two GPUs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from loadgen.common.errors import LoadgenError
from loadgen.sizing.plan import Bound, Load, mean_batch, plan, tpot, ttft
from loadgen.sizing.rates import Rates, read_rates

RATES = Rates(
    model="m",
    gpu="g",
    source="made up",
    prefill_ms={100: 10, 1000: 100},
    decode_step_ms={1: 5, 101: 15},
    decode_context=1100,
    kv_bytes_per_token=100_000,
    kv_read_gb_s=1000,
    kv_gb=100,
)
LOAD = Load(input_tokens=1000, output_tokens=200, ttft_s=1.0, tpot_s=0.0125, attainment=0.9)


def test_batch_follows_littles_law() -> None:
    # batch = rate × output tokens × step; step = 4.9 ms + 0.1 ms × batch.
    rate = 20.0
    batch = mean_batch(RATES, LOAD, rate)
    assert batch == pytest.approx(rate * 200 * 4.9e-3 / (1 - rate * 200 * 0.1e-3))
    assert mean_batch(RATES, LOAD, 50.0) == math.inf


def test_counts_are_the_fewest_that_meet_the_limits() -> None:
    for rate in (1.0, 15.0, 60.0, 700.0):
        found = plan(RATES, LOAD, rate)
        assert found.ttft_s == ttft(RATES, LOAD, rate, found.prefill) <= LOAD.ttft_s
        assert found.tpot_s == tpot(RATES, LOAD, rate / found.decode) <= LOAD.tpot_s
        if found.prefill > 1:
            assert ttft(RATES, LOAD, rate, found.prefill - 1) > LOAD.ttft_s
        if found.decode > 1:
            assert tpot(RATES, LOAD, rate / (found.decode - 1)) > LOAD.tpot_s
        assert found.bound is Bound.TPOT
        assert found.prefill_busy == pytest.approx(rate * 0.1 / found.prefill)
        assert found.kv_gb_s == pytest.approx(rate * 0.1 / found.prefill)


def test_spare_workers_come_on_top() -> None:
    without, with_two = plan(RATES, LOAD, 60.0), plan(RATES, LOAD, 60.0, spare=2)
    assert with_two.gpus == without.gpus + 4
    assert dataclasses.replace(with_two, spare=0) == without


def test_little_memory_bounds_the_batch() -> None:
    # 1,200 tokens of 100 kB: 0.12 GB a sequence.
    small = RATES.model_copy(update={"kv_gb": 2.4})
    found = plan(small, LOAD, 60.0)
    assert found.bound is Bound.KV_MEMORY
    assert found.decode > plan(RATES, LOAD, 60.0).decode
    assert found.batch < 20


def test_nothing_is_extrapolated_beyond_the_largest_batch() -> None:
    loose = dataclasses.replace(LOAD, tpot_s=1.0)
    found = plan(RATES, loose, 500.0)
    assert found.bound is Bound.BATCH
    assert found.batch < RATES.max_batch


def test_cached_prompts_need_fewer_prefill_workers() -> None:
    cached = dataclasses.replace(LOAD, prefix_hits=0.8)
    assert plan(RATES, cached, 60.0).prefill < plan(RATES, LOAD, 60.0).prefill
    assert plan(RATES, cached, 60.0).decode == plan(RATES, LOAD, 60.0).decode


def test_longer_sequences_slow_a_step() -> None:
    assert RATES.step_s(50, 2100) - RATES.step_s(50, 1100) == pytest.approx(50 * 1000 * 100_000 / 1e12)
    assert RATES.step_s(1, 1) >= 0.005


def test_long_prompts_go_on_with_the_last_slope() -> None:
    assert RATES.prefill_s(550) == pytest.approx(0.055)
    assert RATES.prefill_s(2000) == pytest.approx(0.2)
    assert RATES.prefill_s(10) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ttft_s": 0.05}, "ttft:50"),
        ({"tpot_s": 0.004}, "tpot:4"),
        ({"input_tokens": 2_000_000.0, "ttft_s": 1e4, "tpot_s": 10.0}, "KV memory"),
    ],
)
def test_what_no_number_of_workers_reaches_is_reported(changes: dict[str, float], words: str) -> None:
    with pytest.raises(LoadgenError, match=words):
        plan(RATES, dataclasses.replace(LOAD, **changes), 1.0)


# bench/LOG.md, two H200 of 2026-11-26, one prefill and one decode worker: requests/s; TTFT, TPOT p50 in ms.
# Where prefill is busier, TTFT is longer than predicted.
MEASURED = ((8.2, 29.0, 4.77), (16.6, 30.2, 5.16), (26.0, 38.2, 6.18), (32.5, None, 6.54), (38.1, None, 7.51))


def test_prediction_is_near_what_two_gpus_did() -> None:
    rates = read_rates("8b-h200")
    median = Load(input_tokens=1024, output_tokens=256, ttft_s=1, tpot_s=1, attainment=1e-9)
    assert median.share == pytest.approx(0.5)
    for rate, first_ms, token_ms in MEASURED:
        if first_ms is not None:
            assert ttft(rates, median, rate, 1) * 1e3 == pytest.approx(first_ms, rel=0.12)
        assert tpot(rates, median, rate) * 1e3 == pytest.approx(token_ms, rel=0.04)


@pytest.mark.parametrize(("limit_ms", "goodput"), [(6, 21.0), (8, 38.0), (12, 38.0)])
def test_sizes_for_measured_goodput_are_not_too_small(limit_ms: float, goodput: float) -> None:
    """Three quarters of what a pair carried within the limits fits on a pair; a little more does not."""
    rates = read_rates("8b-h200")
    load = Load(input_tokens=1024, output_tokens=256, ttft_s=0.5, tpot_s=limit_ms / 1e3, attainment=0.9)
    assert plan(rates, load, 0.75 * goodput).gpus == 2
    assert plan(rates, load, 1.05 * goodput).gpus > 2
