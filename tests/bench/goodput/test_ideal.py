"""The ideal by hand for a few arrivals, and at the rates where arithmetic says what it is."""

from __future__ import annotations

import random

import pytest

from baton.perf_model.profile import Profile, read_profile
from bench.goodput.ideal import Arrival, Ideal, Workers, simulate

COSTS = Profile(
    model="m",
    gpu="g",
    source="s",
    prefill_ms={1000: 20.0, 2000: 40.0},
    decode_step_ms={1: 5.0, 11: 10.0},
    decode_context=1000,
    kv_bytes_per_token=1,
    kv_read_gb_s=1e6,
    kv_gb=1,
).costs


def close(found: Ideal, ttft_ms: float, tpot_ms: float) -> bool:
    in_ms = found.ttft_s * 1e3, found.tpot_s * 1e3
    return all(abs(one - wanted) < 1e-3 for one, wanted in zip(in_ms, (ttft_ms, tpot_ms), strict=True))


def test_one_alone_takes_its_prefill_and_the_shortest_steps() -> None:
    (found,) = simulate([Arrival(3.0, 1000, 101)], COSTS, Workers(1, 1))
    assert close(found, 20, 5)


def test_prompts_wait_for_one_another_unless_there_are_two_workers() -> None:
    arrivals = [Arrival(0.0, 1000, 1), Arrival(0.001, 2000, 1)]
    assert close(simulate(arrivals, COSTS, Workers(1, 1))[1], 59, 0)
    assert close(simulate(arrivals, COSTS, Workers(2, 1))[1], 40, 0)


def test_sequences_share_steps_and_join_between_them() -> None:
    first, second = simulate([Arrival(0.0, 1000, 3), Arrival(0.0, 1000, 3)], COSTS, Workers(2, 1))
    assert close(first, 20, 5.5)
    assert close(second, 20, 5.5)
    first, second = simulate([Arrival(0.0, 1000, 3), Arrival(0.002, 1000, 3)], COSTS, Workers(2, 1))
    # Steps of 5 from 20 on, of 5.5 from 25 on (two), of 5 from 30.5 on; the second comes at 22.
    assert close(first, 20, (5 + 5.5) / 2)
    assert close(second, 20, (3 + 5.5 + 5) / 2)
    apart = simulate([Arrival(0.0, 1000, 3), Arrival(0.002, 1000, 3)], COSTS, Workers(2, 2))
    assert all(close(one, 20, 5) for one in apart)


def test_the_batch_is_littles() -> None:
    """10 a second of 100 tokens after the first: a batch of 10 · 100 · step."""
    draw, at, arrivals = random.Random(1), 0.0, []
    for _ in range(2000):
        at += draw.expovariate(10)
        arrivals.append(Arrival(at, 1000, 101))
    found = simulate(arrivals, COSTS, Workers(1, 1))
    step = 5.0 / (1 - 10 * 0.1 * 0.5) * 0.9  # step = 5 + (batch - 1) / 2, batch = step in ms
    mean = sum(one.tpot_s for one in found) / len(found) * 1e3
    assert mean == pytest.approx(step, rel=0.05)


def shared(arrivals: list[Arrival], prefill: int, both: int, tpot_ms: float) -> list[Ideal]:
    return simulate(arrivals, COSTS, Workers(prefill, 0, both, tpot_ms / 1e3))


def test_a_combined_worker_gives_prompts_what_its_limit_leaves() -> None:
    """20 ms of a prompt beside steps of 5 ms: in 4 steps of 10, or in two of 15."""
    arrivals = [Arrival(0.0, 1000, 101), Arrival(0.0205, 1000, 1)]
    first, second = shared(arrivals, 0, 1, 10)
    assert close(first, 20, (4 * 10 + 96 * 5) / 100)
    assert close(second, 44.5, 0)
    first, second = shared(arrivals, 0, 1, 15)
    assert close(first, 20, (2 * 15 + 98 * 5) / 100)
    assert close(second, 34.5, 0)


def test_a_combined_worker_beside_a_prefill_worker_computes_what_it_has_room_for() -> None:
    arrivals = [Arrival(0.0, 1000, 1001), Arrival(0.0215, 1000, 1), Arrival(0.0215, 1000, 1)]
    _, second, third = shared(arrivals, 1, 1, 10)
    assert close(second, 20, 0)
    assert third.ttft_s == pytest.approx(0.040, abs=0.006), "begun in its next step, in 4 steps of 10 ms"
    _, _, third = shared(arrivals, 1, 1, 5.1)
    assert close(third, 40, 0), "there is no room, so it waits for the other"
    assert len(shared(arrivals, 0, 2, 5.1)) == 3


def test_the_shipped_profile_of_fp8_are_faster() -> None:
    bf16, fp8 = read_profile("8b-h100"), read_profile("8b-h100-fp8")
    for batch in (1, 32, 128):
        assert fp8.costs.token_s(batch, batch * 1120) < bf16.costs.token_s(batch, batch * 1120)
