"""Predicted steps of a worker whose batches are padded, and how many sequences it runs within a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.base.prefill_defaults import MOST_PREFILL_SHARE
from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import HANDOFF_S, StepCosts
from services.router.placement.forecast import (
    TPOT_SAFETY,
    TTFT_SAFETY,
    PromptAt,
    knows_sequences,
    loaded_step_s,
    mean_context,
    meets_alone,
    prefill_delay_s,
    prefill_misses,
    sequence_delay_s,
    sequences_within,
    step_s,
    usual_output,
)
from services.router.request.slo import Due
from services.router.workers.backlog import PromptWait
from services.router.workers.decode_load import DecodeLoad
from services.router.workers.other_claims import SiblingCounts
from services.router.workers.recent_work import Turnover
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import bare_worker

CONTEXT = 1000
# Batches of 4, 8 and 16 sequences: 5, 6 and 8 ms.
CURVE = {1: 0.0, 4: 0.0, 5: 0.001, 8: 0.001, 9: 0.003, 16: 0.003}


def decoding(sequences: int, *, curve: bool = True) -> Worker:
    worker = bare_worker("decode-0", slots=16)
    worker.costs = StepCosts(
        decode_step_s=0.005,
        decode_sequence_s=1e-5,
        decode_context_token_s=1e-8,
        decode_curve=Curve(tuple(CURVE), tuple(CURVE.values())) if curve else Curve(),
    )
    worker.claimed_slots, worker.claimed_context = sequences, sequences * CONTEXT
    return worker


@pytest.mark.parametrize(
    ("sequences", "curve_s"), [(1, 0.0), (4, 0.0), (5, 0.001), (8, 0.001), (9, 0.003), (16, 0.003)]
)
def test_a_step_is_as_long_as_its_batch(sequences: int, curve_s: float) -> None:
    worker = decoding(sequences)
    assert step_s(worker, 0) == pytest.approx(0.005 + curve_s + sequences * 2e-5)
    assert step_s(decoding(sequences, curve=False), 0) == pytest.approx(0.005 + sequences * 2e-5)


def test_between_two_numbers_a_curve_is_linear() -> None:
    worker = decoding(0)
    worker.costs = replace(worker.costs, decode_curve=Curve((1, 16), (0.0, 0.003)))
    assert step_s(worker, 6, 0) == pytest.approx(0.005 + 5 / 15 * 0.003 + 6e-5)


def test_what_a_sequence_adds_is_by_the_whole_curve() -> None:
    assert decoding(3).costs.each_s(CONTEXT) == pytest.approx(0.003 / 15 + 2e-5)


@pytest.mark.parametrize("curve", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 1.1])
def test_so_many_sequences_are_within_a_limit_as_steps_say(curve: bool, ratio: float) -> None:
    for running in range(17):
        worker = decoding(running, curve=curve)
        worker.tpot_ratio.value = ratio
        for limit_ms in (3.0, 5.15, 5.3, 6.3, 7.0, 8.4, 9.0):
            limit_s = limit_ms / 1e3
            fit = [
                more
                for more in range(16 - running + 1)
                if step_s(worker, more, more * CONTEXT) <= TPOT_SAFETY * limit_s
            ]
            assert sequences_within(worker, limit_s, CONTEXT) == max(fit, default=0), (running, limit_ms)


@pytest.mark.parametrize(("decoding_slots", "stay"), [(8, 6.0), (1, 7.0), (0, 8.0)])
def test_room_is_for_sequences_that_run_at_a_first_token(decoding_slots: int, stay: float) -> None:
    """Four sequences a second have ended lately, and first tokens took half a second: two will have ended,
    but no more than are decoded."""
    worker, now = decoding(8, curve=False), [0.0]
    worker.decoding_slots = decoding_slots
    worker.turnover = Turnover(lambda: now[0])
    for _ in range(8):
        worker.turnover.add()
    assert worker.staying == 1.0, "no request has ended of which the time to the first token is known"
    worker.first_token_s.observe(0.5)
    assert worker.staying == stay / 8
    limit_s = (0.005 + 12 * 2e-5) / TPOT_SAFETY
    assert sequences_within(worker, limit_s + 1e-6, CONTEXT) == 12 - stay
    now[0] = 2.1
    assert worker.staying == 1.0


def test_an_empty_worker_has_all_its_room() -> None:
    worker = decoding(0)
    worker.turnover.add()
    worker.first_token_s.observe(0.5)
    assert worker.staying == 1.0


@pytest.mark.parametrize("over", [1.0, 1.04])
def test_a_prompt_makes_those_miss_that_may_still_meet_their_limits(over: float) -> None:
    """Room is for what runs at a first token, so steps of all that hold slots may seem a little too long."""
    worker, prompt = decoding(8, curve=False), PromptAt(0.1, PromptWait(0.0, 0))
    limit_s = step_s(worker, 0) / TPOT_SAFETY / over
    worker.tpot_limits = [limit_s] * 8
    assert prefill_misses(worker, prompt, left_s=None) == 8
    worker.tpot_limits = [0.8 * limit_s] * 8
    assert prefill_misses(worker, prompt, left_s=None) == 0, "they miss them in any case"


def test_a_prompt_delays_sequences_of_other_processes() -> None:
    """Also where this process has none at the worker that says how near they are to their limits."""
    worker, prompt = (
        bare_worker("both-0", slots=16, receives_handoffs=True),
        PromptAt(0.1, PromptWait(0.0, 0)),
    )
    worker.costs = StepCosts(decode_step_s=0.005)
    assert prefill_delay_s(worker, prompt, handed_over=False, behind=0) == pytest.approx(0.1)
    worker.set_siblings(SiblingCounts(processes=1, slots=3, context=3 * CONTEXT))
    assert prefill_delay_s(worker, prompt, handed_over=False, behind=0) == pytest.approx(0.4)


def test_tokens_a_step_shorten_what_is_predicted() -> None:
    """Steps of two rows a sequence that give two tokens are as steps of half the length."""
    one, two = bare_worker("decode-0", slots=16), bare_worker("decode-1", slots=16)
    one.costs = StepCosts(decode_step_s=0.003, decode_context_token_s=1e-8)
    two.costs = StepCosts(decode_step_s=0.006, decode_context_token_s=2e-8, tokens_a_step=2.0)
    for tpot_s in (0.0029, 0.0033):
        assert meets_alone(one, tpot_s, 1000) is meets_alone(two, tpot_s, 1000) is (tpot_s > 0.003)
        assert sequences_within(one, tpot_s, 1000) == sequences_within(two, tpot_s, 1000)
    assert knows_sequences(one, 1000) is knows_sequences(two, 1000) is True


def test_a_long_max_tokens_is_no_prediction() -> None:
    assert (usual_output(100), mean_context(1000, 100)) == (100, 1050)
    assert (usual_output(100_000), mean_context(1000, 100_000)) == (512, 1256)


@pytest.mark.parametrize(("share", "times"), [(0.0, 1.0), (0.5, 2.0), (MOST_PREFILL_SHARE, 8.0), (1.0, 8.0)])
def test_prompts_leave_decode_an_eighth_of_the_time(share: float, times: float) -> None:
    costs = StepCosts(decode_step_s=0.005)
    assert loaded_step_s(costs, DecodeLoad(1, 0, share)) == pytest.approx(0.005 * times)


def test_a_first_token_is_in_time_with_a_margin() -> None:
    worker, prompt = bare_worker("prefill-0"), PromptAt(0.08, PromptWait(0.015, 0))
    assert TTFT_SAFETY == 0.95
    assert prefill_misses(worker, prompt, left_s=0.101) == 0
    assert prefill_misses(worker, prompt, left_s=0.099) == 1


def test_a_handoff_delays_a_first_token() -> None:
    worker, prompt = bare_worker("prefill-0"), PromptAt(0.1, PromptWait(0.0, 0))
    own = prefill_delay_s(worker, prompt, handed_over=False, behind=0)
    assert prefill_delay_s(worker, prompt, handed_over=True, behind=0) == pytest.approx(own + HANDOFF_S)
    assert HANDOFF_S == 0.002


@pytest.mark.parametrize(
    ("used", "weight"), [(0.25, 1.0), (0.5, 1.0), (0.75, 1.5**4), (1.0, 16.0), (2.0, 16.0)]
)
def test_how_much_a_second_of_a_prompts_delay_counts(used: float, weight: float) -> None:
    """`used`: the share of its limit after which its first token comes."""
    worker, prompt = bare_worker("prefill-0"), PromptAt(0.1, PromptWait(0.0, 0))
    due = Due(left_s=0.1 / used, limit_s=0.1 / used)
    delay_s = prefill_delay_s(worker, prompt, handed_over=False, behind=0, due=due)
    assert delay_s == pytest.approx(0.1 * weight)


@pytest.mark.parametrize(
    ("used", "weight"), [(0.5, 0.03125), (0.86, 0.977), (0.92, 2.239), (0.99, 10.0), (1.5, 10.0)]
)
def test_how_much_a_second_of_a_sequences_delay_counts(used: float, weight: float) -> None:
    """`used`: the share of its limit that its steps take."""
    alone_s = sequence_delay_s(bare_worker("decode-0"), 0.01, 1, 0.0, 0.01 * used)
    assert alone_s == pytest.approx(0.01 * used * weight, rel=1e-3)
    assert sequence_delay_s(bare_worker("decode-0"), None, 1, 0.0, 0.01) == pytest.approx(0.01)
