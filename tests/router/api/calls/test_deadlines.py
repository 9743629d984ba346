"""A deadline that comes before a call's turn in the queue refuses it at once, over both APIs."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from services.router.queue import drain_rate
from tests.router.api.test_slo import retry_delay_s
from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.http_client import complete, http

PROMPT = [9, 8, 7]
WAITING = 80


async def test_calls_behind_a_long_queue(site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, in which a request takes 20 ms at least: at most 26 of those that wait are placed within
    0.3 s, by what is known after four."""
    monkeypatch.setattr(drain_rate, "LEAST_PLACEMENTS", 4)
    async with site(slots=1) as here, http(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.02
        request = ids_request(PROMPT, 2)
        first = asyncio.create_task(here.generate(ids_request(PROMPT, 400), timeout=60))
        await until(lambda: here.router.directory.workers[1].claimed_slots == 1)
        waiting = [asyncio.create_task(here.generate(request, timeout=60)) for _ in range(WAITING)]
        await until(lambda: here.router.queue.waiting == WAITING, 20)
        first.cancel()
        await until(lambda: here.router.observations.outcomes["length"] == 6, 20)
        with pytest.raises(grpc.aio.AioRpcError, match=r"refused early: [0-9]+ requests wait") as refused:
            await here.generate(request, timeout=0.3)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert retry_delay_s(refused.value) > 0
        client.headers["x-request-timeout-ms"] = "300"
        response = await complete(client)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        assert int(response.headers["retry-after"]) >= 1
        assert here.router.queue.refused_early == {"deadline": 2, "limits": 0}
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await here.quiet()
        assert tokens_of(await here.generate(request, timeout=5)) == expected(PROMPT, 2)


async def test_without_a_measured_rate_a_call_waits_until_its_deadline(site: SiteMaker) -> None:
    async with site(slots=1) as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        waiting = [asyncio.create_task(here.generate(ids_request(PROMPT, 200), timeout=60)) for _ in range(8)]
        await until(lambda: here.router.queue.waiting == 7)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await here.generate(ids_request(PROMPT, 2), timeout=0.3)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert here.router.queue.refused_early["deadline"] == 0
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await here.quiet()
