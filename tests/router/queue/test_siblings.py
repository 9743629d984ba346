"""Early refusal counts what waits in the router's other processes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import PrefillClaim
from services.router.placement.placement import Placement
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.workers.backlog import Prompt, Queued
from tests.router.workers.bare_workers import Found, bare_worker, pools_of

SLO = Slo(0.5, None)


@dataclass
class Reported:
    """Reports that siblings have sent."""

    waiting_for_prefill: int
    queued: Queued


async def claim(queue: WaitingQueue, priority: int = 0) -> None:
    """A prompt of 10 ms, whose first token is due in 500; ends when a prefill worker has room."""
    loop = asyncio.get_running_loop()
    entry = queue.enter(ClientCall(priority=priority), SLO)
    await queue.claim(entry, 100, 10, loop.time() + 60, lambda worker: 0)


@pytest.mark.parametrize("nothing_waits_here", [True, False])
async def test_as_large_a_part_of_it_as_of_what_waits_here(nothing_waits_here: bool) -> None:
    """A prefill worker has prompts for 300 ms, and another process some for a second. A request that
    would wait behind them is refused; a more urgent one is not, where less urgent ones wait."""
    workers = [bare_worker("prefill-0"), bare_worker("decode-0", slots=64)]
    workers[0].costs = StepCosts(prefill_token_s=1e-4)
    for _ in range(30):
        PrefillClaim(workers[0], 100, 0.01)
    placement = Placement(Found(workers), pools_of(workers), 100, refuse_late=True)
    queue = WaitingQueue(placement, 8, 60.0)
    tasks = []
    if not nothing_waits_here:
        tasks.append(asyncio.create_task(claim(queue)))
        await asyncio.sleep(0)
        assert queue.waiting == 1
        assert sum(queue.prompts) == pytest.approx(0.01)
    queue.siblings = Reported(9, Queued(9, 1.0, [Prompt(1.0, 0, math.inf, 0.01, limits_known=False)]))
    urgent = asyncio.create_task(claim(queue, priority=-1))
    await asyncio.sleep(0)
    assert urgent.done() is nothing_waits_here
    with pytest.raises(BatonError, match="time to first token would be") as refusal:
        await claim(queue)
    assert refusal.value.kind is ErrorKind.RATE_LIMITED
    for task in (*tasks, urgent):
        task.cancel()
    await asyncio.gather(*tasks, urgent, return_exceptions=True)


async def test_shorter_prompts_go_before_longer_ones_of_siblings() -> None:
    workers = [bare_worker("prefill-0"), bare_worker("decode-0", slots=64)]
    workers[0].costs = StepCosts(prefill_token_s=1e-4)
    queue = WaitingQueue(Placement(Found(workers), pools_of(workers), 100, refuse_late=True), 8, 60.0)
    for length_s, is_refused in ((0.5, False), (0.01, True)):
        prompts = [Prompt(1.0, 0, math.inf, length_s, limits_known=False)]
        queue.siblings = Reported(2, Queued(2, 1.0, prompts))
        if is_refused:
            with pytest.raises(BatonError, match="time to first token would be"):
                await claim(queue)
        else:
            await claim(queue)
