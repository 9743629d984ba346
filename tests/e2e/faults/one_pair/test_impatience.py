"""A router of little patience: its queue is short, and what outlives its drain ends with an error."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.faults.one_pair.test_cancels import until_full, until_waiting
from tests.e2e.faults.one_pair.test_stopping import GREEDY, PROMPT, STOP_S, all_decode, ends, handoffs
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up, descendants

# Of a router alone: tests/router/tenants/test_places.py; test_full_queues.py and test_request_ends.py in
# tests/router/lifecycle.
pytestmark = pytest.mark.slow

SLOTS = 2
CONFIG = "router: {max_waiting: 2, queue_timeout_s: 2}\ndrain_s: 0.2\n"
LONG = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT), max_tokens=1900, **GREEDY)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """The last test ends it."""
    flags = ("--dtype", "float64", "--slots", str(SLOTS), "--both", "1")
    with baton_up(model, *flags, config=CONFIG) as running:
        yield running


async def test_a_full_queue_refuses_and_a_long_wait_ends(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4}
    async with cluster.stub() as stub, cluster.http() as client:
        running = [stub.Generate(LONG, timeout=60) for _ in range(SLOTS)]
        await until_full(cluster)
        late_call = stub.Generate(LONG, timeout=60)
        late_post = asyncio.create_task(client.post("/v1/completions", json=body))
        await until_waiting(cluster, 2)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await stub.Generate(LONG, timeout=60).read()
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert full.value.details() == "2 requests wait already"
        refused(await client.post("/v1/completions", json=body), "wait already")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await late_call.read()
        assert late.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert late.value.details() == "no slot became free within 2 s"
        refused(await late_post, "no slot became free")
        for call in running:
            call.cancel()
        await assert_all_free(cluster, 1.0)
        assert (await client.post("/v1/completions", json=body)).status_code == 200


def refused(response: httpx.Response, why: str) -> None:
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = response.json()["error"]
    assert error["type"] == "overloaded_error"
    assert why in error["message"]


async def test_streams_that_outlive_the_drain_end_with_an_error(cluster: Cluster) -> None:
    children = descendants(cluster.process.pid)
    decoded = await handoffs(cluster)
    async with cluster.stub() as stub, cluster.http() as client:
        call = stub.Generate(LONG, timeout=60)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "stream": True, **GREEDY}
        events = asyncio.create_task(_events(client, body))
        await all_decode(cluster, decoded + 2)
        cluster.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            async for _ in call:
                pass
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert cut.value.details()
        error = json.loads((await events)[-1])["error"]
        assert error["code"] == "unavailable"
        assert error["message"]
    assert await asyncio.to_thread(ends, cluster.process, children, STOP_S) == 0


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
