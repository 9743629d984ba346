"""The request that a process reports to its siblings as its first that waits, and when it reports again."""

from __future__ import annotations

import asyncio
import math

import pytest

from baton.base.errors import BatonError
from services.router.placement.claim import Claim
from services.router.queue import waiting_queue
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import TenantLimits
from services.router.workers.other_claims import FIRST, Precedence
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import placement_of, workers_of

pytestmark = pytest.mark.virtual_time


class Waiting:
    """A queue before a pair of workers without a free slot, and what it has said."""

    def __init__(self) -> None:
        self.workers = workers_of("prefill-0", "decode-0")
        self.decode.claimed_slots = 8
        self.queue = WaitingQueue(placement_of(self.workers), 100, 60.0)
        self.said: list[Precedence | None] = []
        self.queue.on_wait = lambda: self.said.append(self.queue.first_waiting)

    @property
    def decode(self) -> Worker:
        return self.workers[1]

    async def begin(
        self, call: ClientCall, slo: Slo | None = None, until_s: float = 60.0
    ) -> asyncio.Future[Claim]:
        """A request begins to wait."""
        now = asyncio.get_running_loop().time()
        claim = self.queue.claim(self.queue.enter(call, slo), 50, 10, now + until_s, lambda worker: 0)
        waiting = asyncio.ensure_future(claim)
        await asyncio.sleep(0.002)
        return waiting

    def place_one(self) -> None:
        self.decode.claimed_slots -= 1
        self.queue.place_waiting()


async def test_the_most_urgent_and_of_these_the_oldest() -> None:
    here = Waiting()
    assert here.queue.first_waiting is None
    started = asyncio.get_running_loop().time()
    requests = [await here.begin(ClientCall(priority=priority)) for priority in (5, 5, 1)]
    assert [said.priority for said in here.said if said] == [5, 5, 1]
    assert here.said[0] == here.said[1], "the same request"
    here.place_one()
    first = here.queue.first_waiting
    assert first is not None
    assert first.priority == 5
    assert 0 <= first.since - started < 0.002 + 0.05
    await requests[2]
    for request in requests:
        request.cancel()


async def test_calls_and_tenants_take_turns() -> None:
    """The other requests have waited since one of theirs was placed."""
    here = Waiting()
    tenant = TenantAccount("a", TenantLimits(), asyncio.get_running_loop().time)
    for pair in ([ClientCall()] * 2, [ClientCall(tenant=tenant), ClientCall(tenant=tenant)]):
        requests = [await here.begin(call) for call in pair]
        await asyncio.sleep(0.02)
        placed_at = asyncio.get_running_loop().time()
        here.place_one()
        first = here.queue.first_waiting
        assert first is not None
        assert first.since >= placed_at
        here.decode.claimed_slots = 7
        here.queue.place_waiting()
        await asyncio.gather(*requests)
        here.decode.claimed_slots = 8


async def test_late_ones_and_those_that_leave_do_not_count() -> None:
    here = Waiting()
    left = await here.begin(ClientCall())
    assert here.said.pop() is not None
    left.cancel()
    await asyncio.sleep(0)
    assert here.said == [None]
    over = await here.begin(ClientCall(), until_s=0.01)
    await asyncio.sleep(0.03)
    assert isinstance(over.exception(), BatonError)
    assert here.said[-1] is None
    late = await here.begin(ClientCall(), Slo(0.02))
    assert here.said[-1] is not None
    await asyncio.sleep(0.05)
    assert here.said[-1] is None
    assert here.queue.waiting == 1
    late.cancel()


async def test_one_that_returns_goes_before_all_unless_it_cannot_be_placed() -> None:
    """A request cannot be placed without free blocks, or when its pool is not served any more."""
    here = Waiting()
    here.decode.claimed_slots = 7
    entry = here.queue.enter(ClientCall())
    now = asyncio.get_running_loop().time()
    await here.queue.claim(entry, 50, 10, now + 60, lambda worker: 0)
    again = asyncio.ensure_future(here.queue.claim(entry, 50, 10, now + 60, lambda worker: 0))
    await asyncio.sleep(0)
    assert here.queue.first_waiting == FIRST
    pool, entry.call.pool = entry.call.pool, "another"
    assert here.queue.first_waiting is None
    entry.call.pool = pool
    here.queue.refused(entry, here.decode)
    assert here.queue.first_waiting is None
    again.cancel()


async def test_a_late_request_leaves_room_to_all_of_its_priority() -> None:
    here = Waiting()
    entry = here.queue.enter(ClientCall(priority=2))
    assert Precedence(2, -math.inf) < entry.precedence < Precedence(3, 0.0)
    entry.late = True
    assert Precedence(2, 1e12) < entry.precedence < Precedence(3, 0.0)


async def test_each_priority_gets_some_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is less urgent than what waits in siblings goes first where none of its priority was placed of
    late."""
    monkeypatch.setattr(waiting_queue, "FLOOR_S", 0.05)
    here = Waiting()
    requests = [await here.begin(ClientCall(priority=7)) for _ in range(2)]
    first = here.queue.first_waiting
    assert first is not None
    assert first.priority == 7
    await asyncio.sleep(0.06)
    first = here.queue.first_waiting
    assert first is not None
    assert first.priority == FIRST.priority
    assert first > FIRST
    here.place_one()
    first = here.queue.first_waiting
    assert first is not None
    assert first.priority == 7, "one was placed"
    for request in requests:
        request.cancel()
