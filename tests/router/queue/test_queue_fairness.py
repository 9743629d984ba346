"""The waiting queue: client calls take turns in it, and none takes more than its share."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.http_client import complete, http

PROMPT = [9, 8, 7]
TOKENS = 8


async def one(here: Site, first: int = 1) -> int:
    """A user with one request; how many requests the only decode worker had taken before it."""
    prompt = [first, 2, 3]
    assert tokens_of(await here.generate(ids_request(prompt, TOKENS))) == expected(prompt, TOKENS)
    prompts = here.worker("prefill-0").prefill.prompts
    return prompts.index(prompt)


async def large(here: Site, prompts: int, n: int) -> int:
    """A call of prompts x n outputs; its status."""
    async with http(here) as client:
        texts = [[number, *PROMPT] for number in range(prompts)]
        return (await complete(client, prompt=texts, n=n, max_tokens=TOKENS)).status_code


async def test_the_next_user_does_not_wait_for_all_of_a_large_call(site: SiteMaker) -> None:
    async with site(slots=1) as here:
        here.worker("decode-0").behaviour.step_s = 0.002
        running = asyncio.create_task(large(here, 10, 4))
        await until(lambda: here.router.queue.waiting == 39)
        taken = len(here.worker("prefill-0").prefill.prompts)
        before = await asyncio.gather(*(one(here, first) for first in (100, 101, 102)))
        assert max(before) - taken <= 5  # its turn came after one more of the large call's, and two others'
        assert here.router.queue.waiting > 20
        assert await running == 200
        await here.quiet()


async def test_large_calls_take_turns_too(site: SiteMaker) -> None:
    async with site(slots=1) as here:
        here.worker("decode-0").behaviour.step_s = 0.002
        first = asyncio.create_task(large(here, 16, 1))
        await until(lambda: here.router.queue.waiting == 15)
        async with http(here) as client:
            second = complete(client, prompt=[[200 + number] for number in range(8)], max_tokens=TOKENS)
            assert (await second).status_code == 200
        assert here.router.queue.waiting >= 4
        assert await first == 200


async def test_a_large_call_uses_only_its_share_of_the_queue(site: SiteMaker) -> None:
    """The call has four times as many outputs as the queue has places, and is served itself."""
    async with site(slots=1, max_waiting=16, waiting_share=0.25) as here:
        here.worker("decode-0").behaviour.step_s = 0.002
        running = asyncio.create_task(large(here, 16, 4))
        await until(lambda: here.router.queue.waiting == 63)
        await asyncio.gather(*(one(here, 100 + number) for number in range(12)))
        assert here.router.queue.waiting > 20
        assert await running == 200
        await here.quiet()


async def test_waiting_outside_the_queue_is_bounded(site: SiteMaker) -> None:
    async with site(slots=1, max_waiting=4, waiting_share=0.5, queue_timeout_s=5) as here:
        here.worker("decode-0").behaviour.step_s = 0.01
        running = asyncio.create_task(large(here, 18, 1))
        await until(lambda: here.router.queue.waiting == 17)
        assert await large(here, 18, 1) == 503
        await one(here)
        assert await running == 200
        await here.quiet()


async def test_waiting_outside_the_queue_has_the_queues_timeout(site: SiteMaker) -> None:
    async with site(slots=1, max_waiting=2, queue_timeout_s=0.2) as here:
        here.worker("decode-0").behaviour.steps_from = 2  # nothing ends
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await here.generate(ids_request(PROMPT, TOKENS, n=4))
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await here.quiet()
