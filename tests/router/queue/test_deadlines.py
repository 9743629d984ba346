"""Calls that cannot be served before their deadline are refused when they come, and no others."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.router.placement.placement import Placement
from services.router.queue.deadlines import check_deadline
from services.router.queue.drain_rate import LEAST_PLACEMENTS, DrainRate
from services.router.queue.request_order import Ahead
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Cluster, Machine, Make, Served
from tests.router.workers.bare_workers import pools_of
from tests.support.fewer import one_in

PAIR: Make = lambda found, workers: Placement(found, pools_of(workers), 2048)  # noqa: E731


def drained(tokens: float, every_s: float, count: int = 2 * LEAST_PLACEMENTS) -> DrainRate:
    drain = DrainRate()
    for number in range(count):
        drain.placed(number * every_s, tokens)
    return drain


def refusal(left_s: float, ahead: Ahead, drain: DrainRate, slots: int = 0, own_s: float = 0) -> BatonError:
    with pytest.raises(BatonError, match="refused early") as caught:
        check_deadline(left_s, ahead, drain, slots, own_s)
    assert caught.value.kind is ErrorKind.DEADLINE
    return caught.value


def test_what_waits_before_a_call_is_judged_by_how_fast_it_was_placed() -> None:
    drain = drained(100, 0.1)  # 1,000 tokens a second, and at most 1,718 by chance
    for requests, left_s in ((50, 3.0), (100, 6.0)):
        check_deadline(left_s, Ahead(requests, requests * 100), drain, 0, 0)
        refused = refusal(left_s / 2, Ahead(requests, requests * 100), drain)
        assert 0 < refused.retry_after_s < left_s
    check_deadline(1.5, Ahead(50, 5000), drain, 40, 0)  # all that run may end at once
    check_deadline(0.001, Ahead(), drain, 0, 0)


def test_what_is_not_known_refuses_nothing() -> None:
    ahead = Ahead(1000, 1e6)
    for drain in (DrainRate(), drained(100, 0.1, LEAST_PLACEMENTS), drained(100, 0.0)):
        check_deadline(0.01, ahead, drain, 1, 0)


def test_a_prompt_that_is_surely_computed_counts() -> None:
    assert refusal(1.0, Ahead(), DrainRate(), own_s=1.5).retry_after_s == 0, "no other time is better"
    check_deadline(1.0, Ahead(), DrainRate(), 0, 1.1)


def test_time_without_a_queue_and_stalls_do_not_slow_the_rate() -> None:
    drain = DrainRate()
    for number in range(40):
        lull = 1000.0 * number
        drain.update(lull, waiting=True)
        drain.placed(lull + 0.1, 100)
        drain.update(lull + 0.1, waiting=False)
    assert 1000 < drain.most_within(1) < 2000
    drain.update(1e6, waiting=True)
    drain.placed(1e6 + 20, 100)  # a worker was started again
    for number in range(1, 20):
        drain.placed(1e6 + 20 + number * 0.1, 100)
    assert drain.most_within(1) > 1000


async def _overloaded(seed: int) -> tuple[list[tuple[float, Served, Served]], int]:
    """Three times as many requests as one pair with 16 slots serves, of mixed lengths. Every tenth has a
    deadline of 0.2 to 8 s, and a twin without one, right behind it: deadline, call and twin."""
    cluster = Cluster([Machine("prefill"), Machine("decode", slots=16)], PAIR)
    draw, loop = random.Random(seed), asyncio.get_running_loop()
    others: list[asyncio.Task[Served]] = []
    pairs: list[tuple[float, asyncio.Task[Served], asyncio.Task[Served]]] = []
    while loop.time() < 25:
        await asyncio.sleep(draw.expovariate(45 if loop.time() < 15 else 5))
        size = draw.choice((64, 1024, 4096)), draw.choice((16, 256))
        if draw.random() > 0.1:
            others.append(asyncio.create_task(cluster.serve(0, None, *size)))
            continue
        left_s = draw.choice((0.2, 1, 2, 4, 8))
        call = asyncio.create_task(cluster.serve(0, None, *size, deadline=loop.time() + left_s))
        await asyncio.sleep(0)
        pairs.append((left_s, call, asyncio.create_task(cluster.serve(0, None, *size))))
    ended = [(left_s, await call, await twin) for left_s, call, twin in pairs]
    await asyncio.gather(*others)
    return ended, cluster.queues[0].refused_early["deadline"]


@pytest.mark.parametrize("seed", one_in(3, range(3)))
def test_under_overload_only_those_are_refused_that_would_be_late(seed: int) -> None:
    pairs, counted = run_virtual(_overloaded(seed))
    refused = [(left_s, twin) for left_s, call, twin in pairs if call.refused_s == 0]
    late = [left_s for left_s, _, twin in pairs if (twin.ttft_s or math.inf) > left_s]
    assert all((twin.ttft_s or math.inf) > left_s for left_s, twin in refused)
    assert counted >= len(refused) >= 0.7 * len(late) > 20
