"""Processes that `baton up` starts again while it serves: a router that dies, a worker whose restart is
refused."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
import pytest

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.support.cluster import (
    MODEL,
    Cluster,
    assert_all_free,
    descendants,
    eventually,
    serves_again,
)
from tests.support.command_lines import command_lines

if TYPE_CHECKING:  # the class is in the stub file only
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

PROMPT = list(range(3, 60))


@pytest.fixture
def cluster(pair: Cluster) -> Cluster:
    """All tests here leave it serving."""
    return pair


async def ready(cluster: Cluster) -> int:
    """The HTTP status of /ready."""
    async with cluster.http() as http:
        return (await http.get("/ready")).status_code


def router_of(cluster: Cluster) -> int:
    """The process id of the cluster's router."""
    commands = command_lines(descendants(cluster.process.pid))
    (pid,) = [pid for pid, command in commands.items() if command.endswith("services.router")]
    return pid


async def broken_stream(cluster: Cluster, stub: RouterServiceAsyncStub, begun: asyncio.Semaphore) -> str:
    """A long request over gRPC that the router's death ends: the status that its client is given."""
    request = GenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=PROMPT), max_tokens=1900, temperature=0, ignore_eos=True
    )
    try:
        async for _ in stub.Generate(request, timeout=60):
            begun.release()
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "it ended"


async def broken_http_stream(cluster: Cluster, begun: asyncio.Semaphore) -> str:
    """The same over HTTP: the kind of error that httpx raises."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    try:
        async with cluster.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                begun.release()
    except httpx.TransportError as error:
        return type(error).__name__
    return "it ended"


@pytest.mark.slow
async def test_a_router_that_dies_is_started_again_where_it_was(cluster: Cluster) -> None:
    async with cluster.stub() as stub:
        before = await cluster.reports()
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(broken_stream(cluster, stub, begun)) for _ in range(3)]
        streams.append(asyncio.create_task(broken_http_stream(cluster, begun)))
        for _ in range(40):
            await begun.acquire()
        killed = router_of(cluster)
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(5):
            ended = await asyncio.gather(*streams)
        assert ended == ["UNAVAILABLE"] * 3 + ["RemoteProtocolError"]
        await serves_again(cluster, stub, PROMPT, 15)
        assert router_of(cluster) != killed
        assert await ready(cluster) == 200
        after = await cluster.reports()
        assert {name: report.front_pid for name, report in after.items()} == {
            name: report.front_pid for name, report in before.items()
        }
    assert cluster.process.poll() is None


@pytest.mark.slow
async def test_a_worker_whose_restart_is_refused_comes_back_with_what_was_missing(
    cluster: Cluster, model: Path
) -> None:
    def ends() -> int:
        return cluster.log.read_text().count("event='worker_exited'")

    away, before = model.with_name("away"), ends()
    async with cluster.stub() as stub:
        front = (await cluster.reports())["prefill-0"].front_pid
        os.rename(model, away)
        try:
            os.kill(front, signal.SIGKILL)
            await eventually(lambda: ends() == before + 2, 20)
            assert await ready(cluster) == 200  # requests wait for it
        finally:
            os.rename(away, model)
        await serves_again(cluster, stub, PROMPT, 20)
        assert await ready(cluster) == 200
        # What ran for the dead router of the test above has ended after decode's 10 s of grace.
        await assert_all_free(cluster, within_s=15)
    assert cluster.process.poll() is None


@dataclass
class Insisting:
    """A client that sends a request again when its connection breaks: how many were answered, and broken."""

    answered: int = 0
    broken: int = 0

    async def ask(self, cluster: Cluster, stub: RouterServiceAsyncStub, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                answer = await cluster.generate(
                    stub, PROMPT, max_tokens=150, temperature=0, ignore_eos=True, seed=self.answered
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.broken += 1
                await asyncio.sleep(0.1)
            else:
                assert len(answer.token_ids) == 150
                self.answered += 1

    async def until_answered(self, count: int) -> None:
        await eventually(lambda: self.answered >= count, 30)


@pytest.mark.slow
async def test_clients_that_try_again_outlive_six_routers(cluster: Cluster) -> None:
    async with cluster.stub() as stub:
        before = await cluster.reports()
        over = asyncio.Event()
        clients = [Insisting() for _ in range(6)]
        running = [asyncio.create_task(client.ask(cluster, stub, over)) for client in clients]
        for number in range(6):
            await asyncio.gather(*(client.until_answered(number + 1) for client in clients))
            os.kill(router_of(cluster), signal.SIGKILL)
            await serves_again(cluster, stub, PROMPT, 30)
        over.set()
        await asyncio.gather(*running)
        assert sum(client.broken for client in clients) >= 6, clients
        await assert_all_free(cluster, within_s=15)
        after = await cluster.reports()
        fronts = [{name: report.front_pid for name, report in reports.items()} for reports in (before, after)]
        assert fronts[0] == fronts[1]
    assert cluster.process.poll() is None
    assert cluster.log.read_text().count("restarting the router") >= 6
