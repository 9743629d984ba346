"""Requests that may pass those that wait for a prefill worker."""

from __future__ import annotations

import asyncio

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import PrefillClaim
from services.router.placement.placement import Placement
from services.router.queue.passing import Passing
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from tests.router.workers.bare_workers import Found, pools_of, workers_of


def test_only_shorter_prompts_pass_and_only_so_many_are_looked_at() -> None:
    passing = Passing(10.0)
    assert passing.may_try(8192), "nothing waits"
    passing.waits(8192, 9.0)
    assert not passing.over
    assert not passing.may_try(8192)
    assert passing.may_try(512)
    passing.waits(512, 9.5)
    assert [passing.may_try(tokens) for tokens in (600, 512, 500)] == [False, False, True]
    for _ in range(59):
        assert not passing.over
        passing.may_try(9000)
    assert passing.over


def test_one_that_has_waited_for_long_is_passed_by_none() -> None:
    passing = Passing(10.0)
    passing.waits(8192, 7.9)
    assert passing.over


@pytest.mark.parametrize("with_output", [True, False])
async def test_a_short_prompt_passes_a_long_one_that_waits_for_a_prefill_worker(with_output: bool) -> None:
    """A long one without output too, which needs a prefill worker alone."""
    workers = workers_of("prefill-0", "decode-0")
    prefill, decode = workers
    prefill.costs = StepCosts(prefill_token_s=1e-4)
    PrefillClaim(prefill, 8000, 0.8)  # all that may be queued there, but for shorter prompts
    placement = Placement(Found(workers), pools_of(workers), 100, refuse_late=True)
    queue = WaitingQueue(placement, 8, 60.0)
    until = asyncio.get_running_loop().time() + 60
    first = queue.enter(ClientCall())
    waits = (
        queue.claim(first, 9000, 10, until, lambda worker: 0)
        if with_output
        else queue.claim_prefill(first, 9000, until)
    )
    long = asyncio.ensure_future(waits)
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        claim = await queue.claim(queue.enter(ClientCall()), 50, 10, until, lambda worker: 0)
    assert (claim.prefill, claim.decode) == (prefill, decode)
    assert not long.done()
    long.cancel()
