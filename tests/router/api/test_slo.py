"""Limits of latency that clients state, over both APIs, and refusals of requests that cannot meet them."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1.worker_pb2 import StepCosts
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected

PROMPT = [9, 8, 7]
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}


async def post(here: Site, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{here.addresses['http']}", verify=False) as client:
        return await client.post("/v1/completions", json=BODY, headers=headers)


async def slow(here: Site, costs: StepCosts) -> None:
    """Lets the workers report these rates."""
    for worker in here.cluster.workers.values():
        worker.step_costs = costs
    workers = here.router.directory.workers
    await until(lambda: all(worker.described.load.step_costs == costs for worker in workers))


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
async def test_limits_are_positive_numbers(site: SiteMaker, header: str, value: str) -> None:
    async with site() as here:
        response = await post(here, **{header: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == header
        request = ids_request(PROMPT, 4)
        request.tpot_slo_ms = -1
        with pytest.raises(grpc.aio.AioRpcError, match="tpot_slo_ms must be from") as refused:
            await here.generate(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_cannot_be_met_is_refused_early_where_configured(site: SiteMaker) -> None:
    async with site(refuse_late=True) as here:
        await slow(here, StepCosts(prefill_token_s=0.1, prefill_step_s=0.3, decode_step_s=0.05))
        for header, value in (("x-slo-ttft-ms", "200"), ("x-slo-tpot-ms", "40")):
            response = await post(here, **{header: value})
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(response.headers["retry-after"]) >= 1
        request = ids_request(PROMPT, 4)
        request.ttft_slo_ms, request.tpot_slo_ms = 250, 100
        with pytest.raises(grpc.aio.AioRpcError, match="would be 300 ms") as refused:
            await here.generate(request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0.04 < retry_delay_s(refused.value) < 0.2
        assert here.router.observations.outcomes["rate_limited"] == 3
        assert not here.worker("prefill-0").prefill.prompts
        request.ttft_slo_ms = 400
        assert tokens_of(await here.generate(request)) == expected(PROMPT, 4)
        response = await post(here)
        assert response.status_code == 200, "without limits nothing is refused"
        await here.quiet()


async def test_a_deadline_that_cannot_be_met_is_refused_early_too(site: SiteMaker) -> None:
    async with site(refuse_late=True) as here:
        await slow(here, StepCosts(prefill_token_s=0.1, prefill_step_s=2.0, decode_step_s=0.05))
        with pytest.raises(grpc.aio.AioRpcError, match="would be 2000 ms") as refused:
            await here.generate(ids_request(PROMPT, 4), timeout=1.9)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert retry_delay_s(refused.value) > 0
        assert not here.worker("prefill-0").prefill.prompts
        assert tokens_of(await here.generate(ids_request(PROMPT, 4), timeout=20)) == expected(PROMPT, 4)
    async with site() as here:
        await slow(here, StepCosts(prefill_token_s=0.1, prefill_step_s=2.0, decode_step_s=0.05))
        served = await here.generate(ids_request(PROMPT, 4), timeout=1.9)
        assert tokens_of(served) == expected(PROMPT, 4)


async def test_otherwise_it_runs(site: SiteMaker) -> None:
    async with site() as here:
        await slow(here, StepCosts(prefill_token_s=0.1, prefill_step_s=0.3, decode_step_s=0.05))
        response = await post(here, **{"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "0.5"})
        assert response.status_code == 200
        (reserved,) = here.worker("decode-0").decode.reserves
        assert reserved.tpot_slo_s == 0.0005
        await here.quiet()


async def test_prefill_workers_are_told_until_when_first_tokens_are_due(site: SiteMaker) -> None:
    async with site() as here:
        for limit in ({"x-slo-ttft-ms": "60000"}, {"x-slo-ttft-ms": "0.001"}, {}):
            assert (await post(here, **limit)).status_code == 200
        given, late, without = (one.first_token_in_s for one in here.worker("prefill-0").prefill.requests)
        assert 0 < given < 60, "what has passed since the request came is over"
        assert late == without == 0
        await here.quiet()


async def test_one_that_waits_is_refused_when_it_is_late(site: SiteMaker) -> None:
    """The only slot is in use and no rate of releases is known: it waits as long as its limit allows."""
    async with site(slots=1, refuse_late=True) as here:
        await slow(here, StepCosts(prefill_token_s=0.01, prefill_step_s=0.05))
        here.worker("decode-0").behaviour.step_s = 0.05
        running = asyncio.create_task(here.generate(ids_request(PROMPT, 40)))
        await until(lambda: here.router.directory.workers[1].claimed_slots == 1)
        request = ids_request(PROMPT, 4)
        request.ttft_slo_ms = 300
        with pytest.raises(grpc.aio.AioRpcError, match="no slot became free in time") as refused:
            await here.generate(request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert here.router.queue.waiting == 0
        assert tokens_of(await running) == expected(PROMPT, 40)
        await here.quiet()


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    return float(retry.retry_delay.ToNanoseconds()) / 1e9
