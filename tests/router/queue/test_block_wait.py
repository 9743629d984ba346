"""A large request is served where decode workers have slots but little memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing

from services.router.queue.block_wait import BlockWait
from services.router.workers.worker import Worker
from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected

CAPACITY = 100
SMALL, LARGE = 24, 90  # tokens, outputs included


async def generate(here: Site, tokens: int, first: int) -> None:
    prompt = [first % 250] * (4 if tokens < LARGE else LARGE - 4)
    count = tokens - len(prompt)
    assert tokens_of(await here.generate(ids_request(prompt, count))) == expected(prompt, count)


@pytest.mark.parametrize("decode", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_large_request_is_not_starved_by_small_ones(site: SiteMaker, decode: int) -> None:
    """Enough clients always have a small request to take what becomes free."""
    async with site(decode=decode, slots=16, queue_timeout_s=60) as here:
        for number in range(decode):
            behaviour = here.worker(f"decode-{number}").behaviour
            behaviour.capacity_tokens, behaviour.step_s = CAPACITY, 0.01
        over = asyncio.Event()

        async def client(number: int) -> int:
            count = 0
            while not over.is_set():
                await generate(here, SMALL - (5 * number + count) % 11, number)
                count += 1
            return count

        clients = [asyncio.create_task(client(number)) for number in range(10 * decode)]
        await until(
            lambda: sum(len(worker.decode.reserves) for worker in here.cluster.workers.values()) > 15 * decode
        )
        try:
            await asyncio.gather(generate(here, LARGE, 100), generate(here, LARGE, 101))
        finally:
            over.set()
            counts = await asyncio.gather(*clients)
        assert min(counts) > 0
        await here.quiet()


async def test_a_request_that_leaves_blocks_no_other(site: SiteMaker) -> None:
    async with site(slots=4, queue_timeout_s=20) as here:
        behaviour = here.worker("decode-0").behaviour
        behaviour.capacity_tokens, behaviour.step_s = CAPACITY, 0.3
        running = asyncio.create_task(generate(here, 40, 1))
        await until(lambda: here.worker("decode-0").decode.used_slots == 1)
        large = asyncio.create_task(generate(here, LARGE, 2))
        await until(lambda: len(here.worker("decode-0").decode.reserves) >= 3)  # it was refused
        small = asyncio.create_task(generate(here, SMALL, 3))
        await asyncio.sleep(0.1)
        assert here.worker("decode-0").decode.used_slots == 1, "the small one waits behind it"
        large.cancel()
        await until(lambda: here.worker("decode-0").decode.used_slots == 2)
        behaviour.step_s = 0.001
        await asyncio.gather(running, small)
        await asyncio.gather(large, return_exceptions=True)
        await here.quiet()


def worker(*, alive: bool = True, blocks: int = 0) -> Worker:
    made: Any = SimpleNamespace(name="w", alive=alive, has_blocks_for=lambda tokens: tokens <= blocks)
    return cast("Worker", made)


def test_the_oldest_waits_and_younger_ones_go_elsewhere() -> None:
    kept, other, roomy = worker(), worker(), worker(blocks=50)
    waits = BlockWait()
    waits.refused(5, kept)
    waits.refused(7, other)  # a younger one has no worker kept for it
    assert waits.holds(5)
    assert not waits.holds(7)
    assert [waits.may_use(5, one, 40) for one in (kept, other, roomy)] == [True, False, True]
    assert [waits.may_use(7, one, 40) for one in (kept, other, roomy)] == [False, True, True]
    assert waits.may_use(4, kept, 40)
    waits.refused(4, other)
    assert waits.may_use(5, kept, 40)
    assert not waits.may_use(5, other, 40)
    waits.ended(5)  # it waits no more in this sense
    assert waits.holds(4)
    waits.ended(4)
    assert waits.may_use(19, other, 40)


def test_an_unreachable_worker_is_not_reserved() -> None:
    kept, other = worker(), worker()
    waits = BlockWait()
    waits.refused(5, kept)
    kept.alive = False  # type: ignore[misc]
    assert waits.may_use(5, other, 40)
    assert waits.may_use(7, other, 40)
    waits.refused(7, other)
    assert waits.holds(7)


def test_a_reservation_is_logged_once_with_its_worker() -> None:
    kept, other = worker(), worker()
    other.name = "other"  # type: ignore[misc]
    waits = BlockWait()
    with structlog.testing.capture_logs() as logs:
        waits.refused(5, kept)
        for one in (kept, other):
            waits.refused(5, one)
        assert not waits.may_use(7, kept, 40)  # it waits where it was refused first
        assert waits.may_use(7, other, 40)
        kept.alive = False  # type: ignore[misc]
        waits.refused(5, other)
        assert not waits.may_use(7, other, 40)
        waits.refused(4, other)
    reported = {"event": "request_waits_for_blocks", "part": "block_wait", "log_level": "info"}
    assert logs == [{**reported, "worker": "w"}, {**reported, "worker": "other"}]


def test_nothing_waits_at_first() -> None:
    waits = BlockWait()
    assert not waits.holds(5)
    assert waits.may_use(5, worker(), 40)
    waits.ended(5)
    assert not waits.holds(5)
