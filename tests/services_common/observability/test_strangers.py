"""Probes and scrapes are answered while strangers try to occupy the port: they connect and say nothing, send
a byte now and then, or a request whose answer they do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest
from prometheus_client import CollectorRegistry

from baton.base.addresses import split_address
from services.common.observability import small_http
from services.common.observability.admin_http import AdminHttp
from services.common.observability.metrics import process_metrics
from services.common.observability.metrics_server import MetricsServer
from tests.services_common.observability.test_admin_http import ChosenProbes, get

STRANGERS = 80
Stranger = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def dribbles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nx: ")
    while not reader.at_eof():
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.05)


async def reads_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(60)


async def occupies(address: str, how: Stranger) -> None:
    """Connects again whenever it was closed."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*split_address(address), limit=1024)
            try:
                await how(reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def served(kind: str) -> AsyncIterator[str]:
    registry = CollectorRegistry()
    process_metrics(registry)
    server = AdminHttp(ChosenProbes(), registry) if kind == "admin" else MetricsServer()
    if isinstance(server, AdminHttp):
        address = await server.start("127.0.0.1", 0)
    else:
        address = await server.start(registry, "127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.stop()


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_arrives_during_the_stop_is_closed(turns: int) -> None:
    async with served("admin") as address:
        sockets = [socket.create_connection(split_address(address)) for _ in range(20)]
        for _ in range(turns):
            await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    left = len(asyncio.all_tasks())
    for one in sockets:
        one.close()
    assert left == 1


@pytest.mark.parametrize("kind", ["admin", "metrics"])
@pytest.mark.parametrize("how", [silent, dribbles, reads_nothing])
@pytest.mark.parametrize("seconds", [0.5, pytest.param(20, marks=pytest.mark.slow)])
async def test_strangers(kind: str, how: Stranger, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if seconds < 1:
        monkeypatch.setattr(small_http, "HEAD_S", 0.1)
    async with served(kind) as address:
        strangers = [asyncio.create_task(occupies(address, how)) for _ in range(STRANGERS)]
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        until, answered = loop.time() + seconds, 0
        while loop.time() < until:
            async with asyncio.timeout(2):
                for path in ("/health", "/ready", "/metrics")[2 * (kind == "metrics") :]:
                    if path != "/metrics" or how is not reads_nothing:
                        assert (await get(address, path))[0] == 200
                        answered += 1
            await asyncio.sleep(0.05)
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        assert answered or how is reads_nothing
    assert (len(asyncio.all_tasks())) == 1
