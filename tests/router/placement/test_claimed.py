"""The claim that a placement makes: its assumed cost, its deadline, and the reports of it to `division`."""

from __future__ import annotations

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement import placement as placement_module
from services.router.placement.claim import Claim
from services.router.placement.fitting import FailedPair
from services.router.placement.forecast import (
    PromptAt,
    mean_context,
    output_token_cost,
    prompt_at,
    usual_output,
)
from services.router.placement.placement import NoRoom
from services.router.placement.room import Waits
from services.router.request.limits import Needs
from services.router.request.slo import Due
from services.router.workers.other_claims import Precedence, SiblingCounts
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import bare_worker, placement_of, workers_of

PREFILL, DECODE = "prefill-0", "decode-0"


@pytest.mark.parametrize(("cached", "to_compute"), [(0, 50), (49, 1), (50, 1)])
def test_a_claim_costs_its_prompt_and_its_output(cached: int, to_compute: int) -> None:
    """A prompt that is cached whole costs as much as one token."""
    prefill, decode = workers_of(PREFILL, DECODE)
    prefill.costs = StepCosts(prefill_token_s=1e-3)
    decode.costs = StepCosts(decode_step_s=0.25)
    claim = placement_of([prefill, decode]).pick(50, 10, lambda worker: cached)
    assert isinstance(claim, Claim)
    token = output_token_cost(prefill, decode, mean_context(50, 10))
    assert token > 1
    assert claim.cost == pytest.approx(to_compute + usual_output(10) * token)


@pytest.mark.parametrize("due", [None, Due(5.0, 9.0)])
def test_predictions_and_the_workers_backlog_know_when_a_prompt_is_due(
    monkeypatch: pytest.MonkeyPatch, due: Due | None
) -> None:
    asked: list[float | None] = []
    added: list[float | None] = []

    def spy(worker: Worker, tokens: int, hits: int, left_s: float | None) -> PromptAt:
        asked.append(left_s)
        return prompt_at(worker, tokens, hits, left_s)

    prefill, decode = workers_of(PREFILL, DECODE)
    add = prefill.backlog.add

    def keep(seconds: float, tokens: int, left_s: float | None) -> int:
        added.append(left_s)
        return add(seconds, tokens, left_s)

    monkeypatch.setattr(placement_module, "prompt_at", spy)
    monkeypatch.setattr(prefill.backlog, "add", keep)
    assert isinstance(placement_of([prefill, decode]).pick(50, 10, due=lambda: due), Claim)
    left_s = None if due is None else 5.0
    assert set(asked) == {left_s}
    assert added == [left_s]


def test_claims_and_their_ends_are_reported_to_the_division(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement = placement_of(workers_of(PREFILL, DECODE))
    reported: list[tuple[object, ...]] = []
    monkeypatch.setattr(placement.division, "placed", lambda *values: reported.append(values))
    monkeypatch.setattr(
        placement.division, "ended", lambda tokens, max_tokens: reported.append((tokens, max_tokens))
    )
    claim = placement.pick(50, 10)
    assert isinstance(claim, Claim)
    claim.decoded(7, 0.01)
    # No worker exchanges prompts with others: none is computed by the worker that decodes.
    assert reported == [(0.0, claim.decode.costs, mean_context(50, 10), 10), (7, 10)]


def test_prompt_and_output_must_fit_together() -> None:
    placement = placement_of([bare_worker(PREFILL, context=59), bare_worker(DECODE, context=59)])
    assert placement.pick(50, 10) is NoRoom.UNFIT
    assert isinstance(placement.pick(50, 9), Claim)
    assert placement.pick(50, 9, needs=Needs(50, 60)) is NoRoom.UNFIT
    assert placement_of([]).pick(50, 9) is NoRoom.DECODE


HERS, MINE, LATER = Precedence(0, 1.0), Precedence(0, 2.0), Precedence(0, 3.0)
# Tokens that are queued, cached ones, who waits in a sibling process -> whether a prompt of 45 tokens goes to
# a worker that is sent one after 100 tokens.
SIBLINGS = [
    (54, 0, (HERS,), True),
    (55, 0, (HERS,), False),
    (55, 0, (LATER,), True),
    (55, 0, (), True),
    (64, 10, (HERS,), True),
    (65, 10, (HERS,), False),
    # Of several the prompts count up to half of what may be queued.
    (49, 0, (HERS, HERS), True),
    (50, 0, (HERS, HERS), False),
]


@pytest.mark.parametrize(("queued", "cached", "waiting", "placed"), SIBLINGS)
def test_prompts_that_wait_in_sibling_processes_count_as_queued(
    queued: int, cached: int, waiting: tuple[Precedence, ...], placed: bool
) -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    prefill.queued_tokens = queued
    prefill.others.set_siblings(SiblingCounts(processes=1, waiting=waiting))
    claim = placement_of([prefill, decode], ahead=100).pick(
        45, 1, lambda worker: cached, precedence=lambda: MINE
    )
    assert isinstance(claim, Claim) is placed


def test_what_a_worker_has_cached_that_is_gone_does_not_count() -> None:
    prefill, gone, decode = workers_of(PREFILL, "prefill-1", DECODE)
    gone.reachable = False
    prefill.queued_tokens = 55
    prefill.others.set_siblings(SiblingCounts(processes=1, waiting=(HERS,)))
    placement = placement_of([prefill, gone, decode], ahead=100)
    claim = placement.pick(45, 1, lambda worker: 40 if worker is gone else 0, precedence=lambda: MINE)
    assert claim is NoRoom.PREFILL


def test_a_worker_designated_for_prefill_decodes_what_it_computed_where_no_other_has_a_slot() -> None:
    designated, other = (bare_worker(f"both-{number}", receives_handoffs=True) for number in (0, 1))
    placement = placement_of([designated, other])
    other.claimed_slots = 8
    # That one would compute the prompt much quicker.
    designated.costs, other.costs = StepCosts(prefill_token_s=1.0), StepCosts(prefill_token_s=1e-5)
    claim = placement.pick(50, 10)
    assert isinstance(claim, Claim)
    assert (claim.prefill, claim.decode) == (designated, designated)
    assert claim.reason == "designated for prefill: no other worker has a free slot"
    assert placement.placed == {"own": 0, "other": 0, "spare": 1}


def test_a_request_waits_for_room_under_its_limit_where_that_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    decode.costs = StepCosts(decode_step_s=0.1)
    placement = placement_of([prefill, decode])

    def placed(*, returning: bool = False) -> bool:
        claim = placement.pick(50, 10, tpot_s=0.05, waits=lambda: Waits.FOR_ITSELF, returning=returning)
        if isinstance(claim, Claim):
            claim.release()
        return isinstance(claim, Claim)

    assert placed(), "no worker would ever meet it"
    monkeypatch.setattr(placement_module, "worth_waiting", lambda *asked: True)
    assert not placed()
    assert placed(returning=True), "it was placed before"


@pytest.mark.parametrize(("waiting", "placed"), [((HERS,), False), ((LATER,), True)])
def test_a_slot_is_left_for_each_request_of_a_sibling_process_that_goes_before(
    waiting: tuple[Precedence, ...], placed: bool
) -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    decode.claimed_slots = 7
    decode.others.set_siblings(SiblingCounts(processes=1, waiting=waiting))
    claim = placement_of([prefill, decode]).pick(50, 10, precedence=lambda: MINE)
    assert (isinstance(claim, Claim), claim is NoRoom.DECODE) == (placed, not placed)


def test_a_decode_worker_need_not_be_one_that_may_compute_the_prompt() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    claim = placement_of([prefill, decode]).pick(50, 10, may_prefill=lambda worker: worker is prefill)
    assert isinstance(claim, Claim)


def test_workers_of_failed_attempts_come_last() -> None:
    workers = workers_of(PREFILL, "prefill-1", "prefill-2", DECODE, "decode-1", "decode-2")
    for worker in (workers[2], workers[5]):
        worker.queued_tokens, worker.claimed_slots = 100, 3
    failed = [FailedPair(workers[0], workers[3]), FailedPair(workers[1], workers[4])]
    claim = placement_of(workers).pick(50, 10, failed=failed)
    assert isinstance(claim, Claim)
    assert (claim.prefill.name, claim.decode.name) == ("prefill-2", "decode-2")


def test_a_combined_worker_leaves_a_prompt_to_a_much_quicker_one_whose_queue_is_full() -> None:
    prefill, both = bare_worker(PREFILL), bare_worker("both-0", receives_handoffs=True)
    prefill.costs, both.costs = StepCosts(prefill_token_s=1e-6), StepCosts(prefill_token_s=1.0)
    placement = placement_of([prefill, both])
    prefill.queued_tokens = 1000
    prefill.backlog.add(1.0, 1000)
    assert placement.pick(50, 10) is NoRoom.PREFILL
    prefill.reachable = False
    assert isinstance(placement.pick(50, 10), Claim)


@pytest.mark.parametrize(("queued", "placed"), [(249, True), (250, False)])
def test_prompts_that_go_after_this_one_do_not_count_as_queued(queued: int, placed: bool) -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    prefill.costs = StepCosts(prefill_token_s=1e-3)
    prefill.queued_tokens = queued
    prefill.backlog.add(10.0, 150)
    claim = placement_of([prefill, decode], ahead=100).pick(50, 10, by_order=lambda: True)
    assert isinstance(claim, Claim) is placed


def test_where_no_prompt_may_start_a_worker_that_was_passed_over_says_what_is_waited_for() -> None:
    """The worker that has the prompt cached soon has room, and another one has room now, but would compute
    all of it."""
    cached, idle, prefill, decode = workers = workers_of("both-0", "both-1", PREFILL, DECODE)
    for worker in (cached, idle):
        worker.costs = StepCosts(prefill_token_s=1e-6)
    for full in (cached, prefill):
        full.queued_tokens = 1000
        for _ in range(3):
            full.backlog.add(1e-6, 300)
    idle.queued_tokens = 300
    placement = placement_of(workers)
    hits = {cached: 500}
    assert placement.pick(500, 10, lambda worker: hits.get(worker, 0)) is NoRoom.CACHED
    idle.queued_tokens = 1000
    assert placement.pick(500, 10, lambda worker: hits.get(worker, 0)) is NoRoom.PREFILL
    assert decode.free_slots == 8
