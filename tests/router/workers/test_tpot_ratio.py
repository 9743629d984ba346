"""The ratio by which predictions of the time per output token are corrected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.forecast import loaded_step_s, step_s
from services.router.workers.backlog import Backlog, BacklogPart
from services.router.workers.decode_load import DecodeLoad, LoadHistory
from services.router.workers.recent_mean import TpotRatio
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import bare_worker, workers_of


def observed(*ratios: float) -> float:
    ratio = TpotRatio()
    for one in ratios:
        ratio.ended(one * 0.005, 0.005)
    return ratio.value


def test_it_approaches_what_requests_have() -> None:
    assert observed() == 1.0
    assert 1.001 < observed(1.04) < 1.004, "a single one says little"
    assert observed(*[1.04] * 500) == pytest.approx(1.04, abs=1e-3)
    assert observed(*[1.04] * 500, *[0.97] * 500) == pytest.approx(0.97, abs=2e-3)


def test_a_request_that_is_stalled_says_no_more_than_a_bound() -> None:
    assert observed(*[1.0] * 500, 1000.0) < 1.003
    assert observed(*[1.0] * 500, 1e-6) > 0.997


def measured() -> Worker:
    worker = bare_worker("decode-0", slots=100)
    worker.costs = StepCosts(decode_step_s=0.005, decode_sequence_s=0.0001)
    return worker


def test_a_request_is_compared_with_the_mean_load_of_its_time() -> None:
    """3 s of it alone, 5.1 ms by the worker's step costs, 1 s beside four others, 5.5 ms; two
    more wait for their prompts."""
    (prefill,), decode, now = workers_of("prefill-0"), measured(), [0.0]
    decode.loads = LoadHistory(lambda: now[0])
    claim = Claim(prefill, decode, 10, 20)
    claim.prefill_ended()
    now[0] = 3.0
    others = [Claim(prefill, decode, 10, 20) for _ in range(6)]
    for other in others[:4]:
        other.prefill_ended()
    now[0] = 4.0
    claim.decoded(100, 0.0052)
    assert decode.tpot_ratio.value == pytest.approx(1.0)
    claim.release()
    claim.decoded(100, 0.0052 * 1.2)
    assert decode.tpot_ratio.value > 1.01
    for other in others:
        other.release()
    alone_s = loaded_step_s(decode.costs, DecodeLoad(1))
    assert step_s(decode) == decode.tpot_ratio.value * alone_s > 0.0051


def test_a_burst_after_a_start_says_nothing_wrong() -> None:
    """96 requests at once, placed before the worker knew what a sequence costs: none was ever alone."""
    (prefill,), decode, now = workers_of("prefill-0"), measured(), [0.0]
    decode.loads, costs = LoadHistory(lambda: now[0]), decode.costs
    decode.costs = replace(costs, decode_sequence_s=0.0)
    claims = [Claim(prefill, decode, 10, 20) for _ in range(96)]
    for claim in claims:
        claim.prefill_ended()
    now[0], decode.costs = 2.0, costs
    for claim in claims:
        claim.decoded(100, 0.005 + 0.0001 * 96)
        claim.release()
    assert decode.tpot_ratio.value == pytest.approx(1.0)


def test_prompts_count_when_the_worker_computes_them() -> None:
    """Eight prompts of 0.1 s in the first second of a sequence, none in the second one of another."""
    decode, now = measured(), [0.0]
    decode.loads, decode.backlog = LoadHistory(lambda: now[0]), Backlog(lambda: now[0])
    alone_s = step_s(decode, 1)
    first = Claim(decode, decode, 10, 20, seconds=0.1)
    now[0] = 0.1
    first.prefill_ended()
    for _ in range(8):
        prompt = PrefillClaim(decode, 10, seconds=0.1)
        now[0] += 0.1
        prompt.release()
    now[0] = 1.1
    first.decoded(100, alone_s / 0.2)
    assert decode.tpot_ratio.value == pytest.approx(1.0)
    assert decode.first_token_s.value == pytest.approx(0.1)
    first.release()
    second = Claim(decode, decode, 10, 20)
    second.prefill_ended()
    now[0] = 2.1
    second.decoded(100, alone_s)
    assert decode.tpot_ratio.value == pytest.approx(1.0)


@pytest.mark.parametrize("before", [0.0, 1000.0])
def test_a_sibling_process_that_starts_or_ends_says_nothing(before: float) -> None:
    """All that it has ever sent comes or goes at once."""
    decode, now = measured(), [0.0]
    decode.loads, decode.backlog = LoadHistory(lambda: now[0]), Backlog(lambda: now[0])
    decode.backlog.set_siblings(BacklogPart(added_s=before))
    claim = Claim(decode, decode, 10, 20)
    claim.prefill_ended()
    now[0] = 1.0
    decode.backlog.set_siblings(BacklogPart(added_s=1000.0 - before))
    claim.decoded(100, 0.006)
    assert decode.tpot_ratio.value == 1.0


@pytest.mark.parametrize(
    ("tokens", "known", "counts"), [(15, True, False), (16, True, True), (100, False, False)]
)
def test_short_outputs_and_workers_without_costs_say_nothing(tokens: int, known: bool, counts: bool) -> None:
    (prefill,), decode = workers_of("prefill-0"), measured()
    if not known:
        decode.costs = StepCosts()
    claim = Claim(prefill, decode, 10, 20)
    claim.prefill_ended()
    claim.decoded(tokens, 0.1)
    assert (decode.tpot_ratio.value != 1.0) is counts
