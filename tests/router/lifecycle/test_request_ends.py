"""Deadlines, cancels, slow clients and drains end requests and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.router.conftest import SiteMaker, ids_request, tokens_of
from tests.router.fake_model import expected
from tests.router.lifecycle.served_requests import PROMPT, failure, served
from tests.support.fewer import each_value_once


@pytest.mark.parametrize("slow", ["reserve_s", "prefill_s", "handoff_s", "step_s"])
async def test_the_clients_deadline_holds(site: SiteMaker, slow: str) -> None:
    async with site() as here:
        setattr(here.worker("prefill-0").behaviour, slow, 0.5)
        setattr(here.worker("decode-0").behaviour, slow, 0.5)
        code, _ = await failure(here, timeout=0.2)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await here.quiet()


async def test_the_routers_own_deadline_holds(site: SiteMaker) -> None:
    async with site(request_timeout_s=0.2) as here:
        here.worker("decode-0").behaviour.step_s = 0.5
        code, _ = await failure(here)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await here.quiet()


@pytest.mark.parametrize(("left_s", "outcome"), [(0.04, "deadline"), (60, "cancelled")])
async def test_a_call_that_is_cancelled_as_its_deadline_comes_is_late(
    site: SiteMaker, left_s: float, outcome: str
) -> None:
    """A client's clock started before the router's, so its cancel comes before the router's deadline."""
    async with site() as here:
        here.worker("prefill-0").behaviour.prefill_s = 0.5
        message = ids_request(PROMPT, 4).SerializeToString()
        (request,) = await here.router.admission.generate(message, left_s + 60)
        request = replace(request, deadline=asyncio.get_running_loop().time() + left_s)
        async with here.router.dispatcher.run(request, asyncio.Event()):
            await asyncio.sleep(0)
        await here.quiet()
        ended = here.router.observations.outcomes
        assert {name: count for name, count in ended.items() if count} == {outcome: 1}


@pytest.mark.parametrize(("delay_ms", "role"), each_value_once([0, 1, 2, 4, 8, 15, 30, 60], ["pair", "both"]))
async def test_cancels_leave_nothing_behind(site: SiteMaker, role: str, delay_ms: int) -> None:
    counts = {"prefill": 0, "decode": 0, "both": 1} if role == "both" else {}
    async with site(slots=4, **counts) as here:
        for worker in here.cluster.workers.values():
            worker.behaviour.reserve_s = 0.004
            worker.behaviour.prefill_s = 0.008
            worker.behaviour.handoff_s = 0.008
            worker.behaviour.step_s = 0.005
        calls = [here.stub.Generate(ids_request([index], 50)) for index in range(8)]
        reads = [asyncio.create_task(_read_all(call)) for call in calls]
        await asyncio.sleep(delay_ms / 1000)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads)
        await here.quiet()
        assert await served(here) == 1


async def _read_all(call: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def test_a_slow_client_delays_no_other(site: SiteMaker) -> None:
    """A client that reads nothing: its sequence runs to its end and frees its slot."""
    async with site(slots=1) as here:
        call = here.stub.Generate(ids_request(PROMPT, 200))
        responses = aiter(call)
        first = await anext(responses)
        assert await served(here) == 1
        rest = [response async for response in responses]
        assert tokens_of([first, *rest]) == expected(PROMPT, 200)
        await here.quiet()


async def test_drain_ends_what_does_not_end(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        call = asyncio.create_task(failure(here))
        await asyncio.sleep(0.1)
        await here.router.dispatcher.drain(0.1)
        code, _ = await call
        assert code == grpc.StatusCode.UNAVAILABLE
        assert (await failure(here))[0] == grpc.StatusCode.UNAVAILABLE
        await here.quiet()
