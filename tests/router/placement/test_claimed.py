"""The claim that a placement makes: what it is taken to cost and when it is due, and who is told of it."""

from __future__ import annotations

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement import placement as placement_module
from services.router.placement.claim import Claim
from services.router.placement.forecast import (
    PromptAt,
    mean_context,
    output_token_cost,
    prompt_at,
    usual_output,
)
from services.router.placement.placement import NoRoom
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


def test_who_divides_prefill_is_told_of_claims_and_of_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = placement_of(workers_of(PREFILL, DECODE))
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(placement.division, "placed", lambda *values: told.append(values))
    monkeypatch.setattr(
        placement.division, "ended", lambda tokens, max_tokens: told.append((tokens, max_tokens))
    )
    claim = placement.pick(50, 10)
    assert isinstance(claim, Claim)
    claim.decoded(7, 0.01)
    # No worker exchanges prompts with others: none is computed by the worker that decodes.
    assert told == [(0.0, claim.decode.costs, mean_context(50, 10), 10), (7, 10)]


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
    other.claimed_slots, designated.queued_tokens = 8, 5
    claim = placement.pick(50, 10)
    assert isinstance(claim, Claim)
    assert (claim.prefill, claim.decode) == (designated, designated)
    assert claim.reason == "designated for prefill: no other worker has a free slot"
    assert placement.placed == {"own": 0, "other": 0, "spare": 1}
