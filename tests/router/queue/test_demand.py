"""Counts by a router of what clients ask of workers, whether it was served or not."""

from __future__ import annotations

import asyncio

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import Claim
from services.router.placement.placement import Placement
from services.router.queue.counted_queue import CountedQueue
from services.router.queue.demand import WINDOW_S, Demand
from services.router.request.request import ClientCall
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.workers.bare_workers import Found, bare_worker, pools_of, workers_of


def _measured(token_s: float) -> Worker:
    worker = bare_worker("prefill-0")
    worker.costs = StepCosts(prefill_token_s=token_s)
    return worker


def test_all_that_comes_counts_for_a_minute_whatever_became_of_it() -> None:
    async def main() -> None:
        demand = Demand(expected_tokens_per_s=100.0)
        for kind in (ErrorKind.OVERLOADED, ErrorKind.DEADLINE, ErrorKind.OVERLOADED):
            with pytest.raises(BatonError), demand.asked(200):
                raise BatonError(kind, "no")
        with demand.asked(200) as asked:
            asked.placed(_measured(0.01))
        assert demand.requests() == 4
        assert demand.prefill_seconds() == pytest.approx(8.0)
        assert demand.unserved() == {"deadline": (1, 2.0), "overloaded": (2, 4.0)}
        await asyncio.sleep(WINDOW_S - 2)
        assert demand.requests() == 4
        await asyncio.sleep(4)
        assert demand.requests() == demand.prefill_seconds() == 0
        assert demand.unserved() == {"deadline": (0, 0), "overloaded": (0, 0)}

    run_virtual(main())


def test_seconds_are_those_of_the_last_worker_and_without_one_the_configured_ones() -> None:
    async def main() -> None:
        demand = Demand()
        assert demand.seconds(10_000) == pytest.approx(1.0)
        with demand.asked(1000) as asked:
            asked.placed(_measured(0.002), cached=400)
        # What was cached is not asked for.
        assert demand.prefill_seconds() == pytest.approx(1.2)
        assert demand.seconds(1000) == pytest.approx(2.0)
        with demand.asked(1000) as asked:
            asked.placed(_measured(0.0))  # a worker that was not measured yet
        assert demand.seconds(10_000) == pytest.approx(1.0)

    run_virtual(main())


def test_what_waits_and_what_its_client_gives_up() -> None:
    async def main() -> None:
        demand = Demand()

        async def wait() -> None:
            with demand.asked(5000):
                await asyncio.sleep(1000)

        tasks = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(1)
        assert demand.waiting() == (2, 10_000, 1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert demand.waiting() == (0, 0, 0)
        assert demand.unserved() == {"abandoned": (2, 1.0)}

    run_virtual(main())


def test_a_queue_counts_each_request_once_whatever_becomes_of_it() -> None:
    """One is placed, one waits until its time is up, and one finds the queue full."""

    async def main() -> None:
        workers = workers_of("prefill-0", "decode-0")
        workers[1].claimed_slots = 7
        demand = Demand()
        queue = CountedQueue(Placement(Found(workers), pools_of(workers), 1000), 1, 60.0, 1.0, demand)

        async def ask() -> Claim:
            return await queue.claim(queue.enter(ClientCall()), 50, 10, 30.0, lambda worker: 20)

        claim = await ask()
        assert demand.waiting() == (0, 0, 0)
        late = asyncio.create_task(ask())
        await asyncio.sleep(1)
        assert demand.waiting()[:2] == (1, 50)
        with pytest.raises(BatonError, match="wait already"):
            await ask()
        with pytest.raises(BatonError, match="no slot became free"):
            await late
        claim.release()
        assert demand.requests() == 3
        assert demand.unserved()["overloaded"][0] == 2
        assert demand.prefill_seconds() == pytest.approx((30 + 50 + 50) / 10_000)

    run_virtual(main())
