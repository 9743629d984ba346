"""Requests that wait: for a slot, or for room in a worker's queue, in order and within bounds."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.lifecycle.served_requests import PROMPT, failure


async def test_a_full_queue_refuses(site: SiteMaker) -> None:
    async with site(slots=1, max_waiting=2, queue_timeout_s=5) as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        answers = await asyncio.gather(
            *(here.generate(ids_request(PROMPT, 6)) for _ in range(6)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) == 3
        assert here.worker("decode-0").decode.most_slots_used == 1
        await here.quiet()


async def test_waiting_is_first_come_first_served(site: SiteMaker) -> None:
    async with site(slots=1) as here:
        order: list[int] = []

        async def one(index: int) -> None:
            await here.generate(ids_request([index], 3))
            order.append(index)

        here.worker("decode-0").behaviour.refuse_reserves = 10**6
        calls = []
        for index in range(8):
            calls.append(asyncio.create_task(one(index)))
            await until(lambda index=index: here.router.dispatcher.running > index)  # type: ignore[misc]
        here.worker("decode-0").behaviour.refuse_reserves = 0
        await asyncio.gather(*calls)
        assert order == list(range(8))


async def test_waiting_has_an_end(site: SiteMaker) -> None:
    async with site(queue_timeout_s=0.2) as here:
        here.worker("decode-0").behaviour.refuse_reserves = 10**6
        code, message = await failure(here)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no slot became free" in message
        here.worker("decode-0").behaviour.refuse_reserves = 0
        await here.quiet()


@pytest.mark.parametrize("others", [0, 2], ids=["reserved-early", "reserved-first"])
async def test_a_full_queue_is_waited_for_and_is_no_failed_attempt(site: SiteMaker, others: int) -> None:
    """Whichever worker's: prompts and reservations are refused many more times than attempts are made."""
    async with site(prefill=1, decode=1, max_attempts=1, queue_timeout_s=60.0) as here:
        behaviours = [here.worker(name).behaviour for name in ("prefill-0", "decode-0")]
        behaviours[1].other_router_slots = others
        for each in range(3):
            behaviours[0].full_prefills, behaviours[1].refuse_reserves = 4 + each, 3
            results = await asyncio.gather(
                *(here.generate(ids_request([each, n, 5], 6), 60) for n in range(4))
            )
            for number, responses in enumerate(results):
                assert tokens_of(responses) == expected([each, number, 5], 6)
        assert behaviours[0].full_prefills == 0
        assert not here.router.observations.failed_attempts
        await here.quiet()


async def test_a_queue_that_stays_full_is_waited_for_as_long_as_for_a_slot(site: SiteMaker) -> None:
    """Refusals do not begin the wait again."""
    async with site(max_attempts=1, queue_timeout_s=0.4) as here:
        here.worker("prefill-0").behaviour.full_prefills = 10**6
        code, message = await failure(here)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no slot became free within 0.4 s" in message
        assert here.worker("prefill-0").behaviour.full_prefills > 10**6 - 40
        await here.quiet()
