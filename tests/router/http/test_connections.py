"""More connections than the router has descriptors for: health answers, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import SiteMaker, ids_request, tokens_of
from tests.router.fake_model import expected
from tests.router.raw_http import Raw, connect, get, post, silent
from tests.router.test_process import config, fake_pair, ready, start

# The attacker's address and everybody else's.
OTHER, MINE = "127.0.0.2", "127.0.0.1"
DESCRIPTORS = 256


async def status(address: str, request: bytes, source: str = MINE) -> int:
    async with connect(address, source) as raw:
        await raw.send(request)
        return (await raw.answer())[0]


@contextlib.asynccontextmanager
async def descriptor_limit_low(folder: Path) -> AsyncIterator[dict[str, str]]:
    """A router process that may have 256 descriptors, over a fake worker; its addresses."""
    async with fake_pair(folder) as worker:
        limit = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
        process = await start(
            config(folder, [worker.address]), *limit, sys.executable, "-m", "services.router"
        )
        try:
            yield await ready(process)
        finally:
            process.kill()
            await process.wait()


async def test_silent_connections_above_the_descriptor_limit(model_folder: Path) -> None:
    """Whatever an attacker opens on one listener, health and requests are answered on both."""
    async with descriptor_limit_low(model_folder) as addresses:
        for listener in ("http", "grpc", "admin_http", "admin"):
            await answers_beside_silent_ones(addresses, listener)


async def answers_beside_silent_ones(addresses: dict[str, str], listener: str) -> None:
    held: list[socket.socket] = []
    try:
        for _ in range(3):
            held += await asyncio.to_thread(silent, addresses[listener], DESCRIPTORS, OTHER)
            for path in ("/health", "/ready"):
                assert await status(addresses["http"], get(path)) == 200, listener
            assert await status(addresses["http"], post(max_tokens=4)) == 200, listener
        if listener == "http":  # the attacker's own share holds its one request up for a second at most
            await asyncio.sleep(1.1)
            assert await status(addresses["http"], post(max_tokens=4), OTHER) == 200
            assert await tokens(addresses["grpc"]) == expected([1, 2], 4)
    finally:
        for one in held:
            one.close()
    assert await tokens(addresses["grpc"]) == expected([1, 2], 4), listener


async def tokens(address: str) -> list[int]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = RouterServiceStub(channel).Generate(ids_request([1, 2], 4), timeout=5, wait_for_ready=True)
        return tokens_of([response async for response in call])


async def test_a_connection_above_the_limit_gets_a_response(site: SiteMaker) -> None:
    """All others have a request that runs: health answers, the rest is refused with a reason."""
    few = {"max_connections": 8, "max_connections_per_address": 8}
    async with site(connections=few, slots=16) as here, contextlib.AsyncExitStack() as stack:
        here.worker("decode-0").behaviour.step_s = 0.05
        address = here.addresses["http"]
        running: list[Raw] = []
        for _ in range(8):
            running.append(await stack.enter_async_context(connect(address)))
            await running[-1].send(post(max_tokens=40))
        await asyncio.sleep(0.3)
        for _ in range(3):
            async with connect(address) as raw:
                await raw.send(post(max_tokens=2))
                code, body = await raw.answer()
                assert (code, json.loads(body)["error"]["code"]) == (503, "overloaded")
                await raw.closed()
            assert await status(address, get()) == 200
            assert await status(address, get("/ready")) == 200
        for raw in running:
            assert (await raw.answer())[0] == 200
        await asyncio.sleep(1.1)  # a connection that just had an answer is not closed yet
        assert await status(address, post(max_tokens=2), OTHER) == 200


async def test_a_client_address_displaces_its_own_connections(site: SiteMaker) -> None:
    few = {"max_connections": 100, "max_connections_per_address": 4}
    async with site(connections=few) as here, contextlib.AsyncExitStack() as stack:
        address = here.addresses["http"]
        mine = await stack.enter_async_context(connect(address, MINE))
        await mine.send(get())
        assert (await mine.answer())[0] == 200
        theirs = [await stack.enter_async_context(connect(address, OTHER)) for _ in range(4)]
        await asyncio.sleep(1.1)
        assert await status(address, get("/version"), OTHER) == 200
        await theirs[0].closed(1)  # the one that waited longest
        with pytest.raises(TimeoutError):
            await theirs[1].closed(0.1)
        await mine.send(get("/version"))
        assert (await mine.answer())[0] == 200
        assert here.router.connections.count < 8


async def test_closed_connections_are_not_counted(site: SiteMaker) -> None:
    async with site() as here:
        for _ in range(20):
            assert await status(here.addresses["http"], get()) == 200
        await asyncio.sleep(0.1)
        assert here.router.connections.count == 0
