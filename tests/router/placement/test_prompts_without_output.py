"""Placement of prompts of which no token is sampled: a prefill worker alone computes them."""

from __future__ import annotations

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import PrefillClaim
from services.router.placement.fitting import FailedPair
from services.router.placement.placement import NoRoom
from services.router.request.limits import Needs
from services.router.request.request import ClientCall
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import placement_of, workers_of

PREFILL, DECODE, BOTH = "prefill-0", "decode-0", "both-0"


async def test_a_prompt_without_output_goes_to_the_least_loaded_prefill_worker() -> None:
    decode, first, second, both, refusing = workers_of(DECODE, PREFILL, "prefill-1", BOTH, "prefill-2")
    first.queued_tokens, second.queued_tokens, both.queued_tokens = 98, 97, 96
    placement = placement_of([decode, first, second, both, refusing], ahead=100)
    refusing.refused()
    for chosen in (both, second, first):
        call = ClientCall()
        claim = placement.pick_prefill(2, call)
        assert not isinstance(claim, NoRoom)
        assert claim.prefill is chosen
        assert type(claim) is PrefillClaim
        assert (call.pool, call.formats.get(chosen.decodes)) == (chosen.pool, "bfloat16")
        claim.release()
        chosen.queued_tokens += 4
    assert placement.pick_prefill(2) is NoRoom.PREFILL
    second.queued_tokens = 0
    second.set_following(following=False)  # only decode workers are followed
    assert isinstance(placement.pick_prefill(2), PrefillClaim)
    second.queued_tokens = 0
    second.unreachable()
    assert placement.pick_prefill(2) is NoRoom.PREFILL


def test_a_prompt_without_output_avoids_workers_where_it_failed() -> None:
    decode, first, second = workers_of(DECODE, PREFILL, "prefill-1")
    first.costs = second.costs = StepCosts(prefill_token_s=1.0)
    placement = placement_of([decode, first, second])
    second.queued_tokens = 50

    def chosen(*failed: FailedPair, usable: Worker | None = None) -> Worker | NoRoom:
        claim = placement.pick_prefill(
            40, failed=failed, may_prefill=lambda one: usable is None or one is usable
        )
        if isinstance(claim, NoRoom):
            return claim
        waits_s = claim.prefill.backlog.wait_s
        assert waits_s == pytest.approx(claim.prefill.costs.prompt_s(40), rel=0.2), "for those behind it"
        claim.release()
        return claim.prefill

    assert chosen() is first
    assert chosen(FailedPair(first, None)) is second
    assert chosen(FailedPair(second, None)) is first
    assert chosen(FailedPair(first, None), FailedPair(second, None)) is first, "where it failed everywhere"
    assert chosen(usable=second) is second
    assert chosen(usable=decode) is NoRoom.PREFILL


def test_a_prompt_without_output_that_no_worker_takes_is_told_from_one_that_waits() -> None:
    decode, prefill = workers_of(DECODE, PREFILL)
    placement = placement_of([decode, prefill])
    beyond = Needs(10**9, 10**9)
    assert placement.pick_prefill(40, needs=beyond) is NoRoom.UNFIT
    prefill.unreachable()
    assert placement.pick_prefill(40, needs=beyond) is NoRoom.PREFILL
