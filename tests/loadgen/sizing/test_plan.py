"""Worker counts: the fewest that are enough, what bounds them, and what was measured on two GPUs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from baton.perf_model.profile import Profile, read_profile
from loadgen.common.errors import LoadgenError
from loadgen.sizing.plan import Bound, Load, mean_batch, plan, tpot, ttft

PROFILE = Profile(
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
    batch = mean_batch(PROFILE, LOAD, rate)
    assert batch == pytest.approx(rate * 200 * 4.9e-3 / (1 - rate * 200 * 0.1e-3))
    assert mean_batch(PROFILE, LOAD, 50.0) == math.inf


def test_counts_are_the_fewest_that_meet_the_limits() -> None:
    for rate in (1.0, 15.0, 60.0, 700.0):
        found = plan(PROFILE, LOAD, rate)
        assert found.ttft_s == ttft(PROFILE, LOAD, rate, found.prefill) <= LOAD.ttft_s
        assert found.tpot_s == tpot(PROFILE, LOAD, rate / found.decode) <= LOAD.tpot_s
        if found.prefill > 1:
            assert ttft(PROFILE, LOAD, rate, found.prefill - 1) > LOAD.ttft_s
        if found.decode > 1:
            assert tpot(PROFILE, LOAD, rate / (found.decode - 1)) > LOAD.tpot_s
        assert found.bound is Bound.TPOT
        assert found.prefill_busy == pytest.approx(rate * 0.1 / found.prefill)
        assert found.kv_gb_s == pytest.approx(rate * 0.1 / found.prefill)


def test_spare_workers_come_on_top() -> None:
    without, with_two = plan(PROFILE, LOAD, 60.0), plan(PROFILE, LOAD, 60.0, spare=2)
    assert with_two.gpus == without.gpus + 4
    assert dataclasses.replace(with_two, spare=0) == without


def test_little_memory_bounds_the_batch() -> None:
    # 1,200 tokens of 100 kB: 0.12 GB a sequence.
    small = PROFILE.model_copy(update={"kv_gb": 2.4})
    found = plan(small, LOAD, 60.0)
    assert found.bound is Bound.KV_MEMORY
    assert found.decode > plan(PROFILE, LOAD, 60.0).decode
    assert found.batch < 20


def test_nothing_is_extrapolated_beyond_the_largest_batch() -> None:
    loose = dataclasses.replace(LOAD, tpot_s=1.0)
    found = plan(PROFILE, loose, 500.0)
    assert found.bound is Bound.BATCH
    assert found.batch < PROFILE.max_batch


def test_several_tokens_a_step_are_as_many_steps_less() -> None:
    """A batch of half as many steps of the same length gives each sequence a token twice as often."""
    twice = PROFILE.model_copy(update={"tokens_a_step": 2.0})
    assert mean_batch(twice, LOAD, 30.0) == pytest.approx(mean_batch(PROFILE, LOAD, 15.0))
    assert tpot(twice, LOAD, 30.0) == pytest.approx(tpot(PROFILE, LOAD, 15.0) / 2)
    assert plan(twice, LOAD, 60.0).decode < plan(PROFILE, LOAD, 60.0).decode


def test_workers_of_several_gpus_are_counted_in_gpus() -> None:
    of_two = plan(PROFILE.model_copy(update={"worker_gpus": 2}), LOAD, 60.0, spare=1)
    of_one = plan(PROFILE, LOAD, 60.0, spare=1)
    assert (of_two.prefill, of_two.decode, of_two.gpus) == (of_one.prefill, of_one.decode, 2 * of_one.gpus)


def test_roles_may_have_different_numbers_of_gpus() -> None:
    """Prompts on two GPUs, which compute them in half the time; decoding on one, of another profile."""
    halved = {length: ms / 2 for length, ms in PROFILE.prefill_ms.items()}
    of_two = PROFILE.model_copy(update={"worker_gpus": 2, "prefill_ms": halved, "kv_gb": 0.001})
    found = plan(of_two, LOAD, 60.0, spare=1, decoding=PROFILE)
    of_one = plan(PROFILE, LOAD, 60.0, spare=1)
    assert found.prefill < of_one.prefill
    assert (found.decode, found.tpot_s, found.bound) == (of_one.decode, of_one.tpot_s, of_one.bound)
    assert found.gpus == 2 * (found.prefill + 1) + found.decode + 1
    slow = PROFILE.model_copy(update={"decode_step_ms": {1: 50, 101: 150}})
    with pytest.raises(LoadgenError, match=r"tpot:12\.5"):
        plan(PROFILE, LOAD, 60.0, decoding=slow)


def test_links_that_are_slow_need_more_prefill_workers() -> None:
    """6 GB of KV a second, of links of 0.5."""
    slow = plan(PROFILE.model_copy(update={"link_gb_s": 0.5}), LOAD, 60.0)
    assert slow.prefill == 12 > plan(PROFILE, LOAD, 60.0).prefill
    assert slow.kv_gb_s == pytest.approx(0.5)


def test_cached_prompts_need_fewer_prefill_workers() -> None:
    cached = dataclasses.replace(LOAD, prefix_hits=0.8)
    assert plan(PROFILE, cached, 60.0).prefill < plan(PROFILE, LOAD, 60.0).prefill
    assert plan(PROFILE, cached, 60.0).decode == plan(PROFILE, LOAD, 60.0).decode


def test_longer_sequences_slow_a_step() -> None:
    more_s = PROFILE.costs.token_s(50, 50 * 2100) - PROFILE.costs.token_s(50, 50 * 1100)
    assert more_s == pytest.approx(50 * 1000 * 100_000 / 1e12)
    # Shorter ones save what longer ones cost, down to a step of one sequence without any.
    assert PROFILE.costs.token_s(1, 1) == pytest.approx(0.005 - 1099 * 100_000 / 1e12)
    assert PROFILE.costs.token_s(20, 20) == pytest.approx(PROFILE.costs.token_s(1, 0))


def test_long_prompts_go_on_with_the_last_slope() -> None:
    assert PROFILE.costs.prompt_s(550) == pytest.approx(0.055)
    assert PROFILE.costs.prompt_s(2000) == pytest.approx(0.2)
    assert PROFILE.costs.prompt_s(10) == pytest.approx(0.01)


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
        plan(PROFILE, dataclasses.replace(LOAD, **changes), 1.0)


# bench/LOG-2026-11.md, two H200 of 2026-11-26, one prefill and one decode worker: requests/s; TTFT, TPOT p50
# in ms. Where prefill is busier, TTFT is longer than predicted.
MEASURED = ((8.2, 29.0, 4.77), (16.6, 30.2, 5.16), (26.0, 38.2, 6.18), (32.5, None, 6.54), (38.1, None, 7.51))


def test_prediction_is_near_what_two_gpus_did() -> None:
    profile = read_profile("8b-h200")
    median = Load(input_tokens=1024, output_tokens=256, ttft_s=1, tpot_s=1, attainment=1e-9)
    assert median.share == pytest.approx(0.5)
    for rate, first_ms, token_ms in MEASURED:
        if first_ms is not None:
            assert ttft(profile, median, rate, 1) * 1e3 == pytest.approx(first_ms, rel=0.12)
        assert tpot(profile, median, rate) * 1e3 == pytest.approx(token_ms, rel=0.04)


@pytest.mark.parametrize(("limit_ms", "goodput"), [(6, 21.0), (8, 38.0), (12, 38.0)])
def test_sizes_for_measured_goodput_are_not_too_small(limit_ms: float, goodput: float) -> None:
    """Three quarters of what a pair carried within the limits fits on a pair; a little more does not."""
    profile = read_profile("8b-h200")
    load = Load(input_tokens=1024, output_tokens=256, ttft_s=0.5, tpot_s=limit_ms / 1e3, attainment=0.9)
    assert plan(profile, load, 0.75 * goodput).gpus == 2
    assert plan(profile, load, 1.05 * goodput).gpus > 2
