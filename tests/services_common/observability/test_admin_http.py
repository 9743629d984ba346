"""The admin HTTP port: three paths, bounded connections, deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from baton.base.addresses import split_address
from services.common.observability import small_http
from services.common.observability.admin_http import AdminHttp
from services.common.observability.metrics import ScrapedCollector, process_metrics


class ChosenProbes:
    """Probes whose answers a test chooses."""

    def __init__(self) -> None:
        self.health: str | None = None
        self.ready: str | None = None

    def unhealthy(self) -> str | None:
        return self.health

    def unready(self) -> str | None:
        return self.ready


@asynccontextmanager
async def served(registry: CollectorRegistry | None = None) -> AsyncIterator[tuple[ChosenProbes, str]]:
    probes = ChosenProbes()
    server = AdminHttp(probes, registry or CollectorRegistry())
    address = await server.start("127.0.0.1", 0)
    try:
        yield probes, address
    finally:
        await server.stop()


async def send(address: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(request)
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


async def get(address: str, path: str) -> tuple[int, bytes]:
    answer = await send(address, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_health_and_readiness_have_their_reasons() -> None:
    async with served() as (probes, address):
        assert await get(address, "/health") == (200, b'{"status": "ok"}')
        assert await get(address, "/ready?now=1") == (200, b'{"status": "ready"}')
        probes.health, probes.ready = "starting", "the model is not loaded"
        code, body = await get(address, "/health")
        assert (code, json.loads(body)) == (503, {"status": "starting"})
        code, body = await get(address, "/ready")
        unavailable = {"status": "unavailable", "reason": "the model is not loaded"}
        assert (code, json.loads(body)) == (503, unavailable)


async def test_metrics_and_404_for_the_rest() -> None:
    registry = CollectorRegistry()
    process_metrics(registry)
    async with served(registry) as (_, address):
        code, body = await get(address, "/metrics")
        assert code == 200
        assert b"process_cpu_seconds_total" in body
        for path in ("/", "/metrics/", "/Health", "/debug", "*"):
            assert (await get(address, path))[0] == 404, path
        for method in (b"POST", b"HEAD", b"DELETE"):
            answer = await send(address, method + b" /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n"), method


async def test_a_scrape_that_fails_is_an_error_and_the_next_one_is_served() -> None:
    failures = [RuntimeError("the engine does not answer")]

    def read() -> list[object]:
        if failures:
            raise failures.pop()
        return []

    registry = CollectorRegistry()
    registry.register(ScrapedCollector(read))  # type: ignore[arg-type]
    async with served(registry) as (_, address):
        assert (await get(address, "/metrics"))[0] == 500
        assert (await get(address, "/metrics"))[0] == 200


@pytest.mark.parametrize(
    "request_", [b"\r\n\r\n", b"GARBAGE\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 20_000]
)
async def test_what_is_no_request_is_refused(request_: bytes) -> None:
    async with served() as (_, address):
        assert (await send(address, request_)).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
        assert (await get(address, "/health"))[0] == 200


async def test_silent_connections_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is closed for a new one, the others soon."""
    monkeypatch.setattr(small_http, "MOST_WAITING", 3)
    monkeypatch.setattr(small_http, "HEAD_S", 0.5)
    async with served() as (_, address):
        silent = [await asyncio.open_connection(*split_address(address)) for _ in range(3)]
        assert (await get(address, "/health"))[0] == 200
        for reader, writer in silent:
            async with asyncio.timeout(5):
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            writer.close()


@pytest.mark.parametrize("hosts", ["", "host: a\r\nhost: a\r\n"])
async def test_a_request_has_one_host(hosts: str) -> None:
    async with served() as (_, address):
        answer = await send(address, f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400")
        answer = await send(address, b"GET /health HTTP/1.0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


async def test_its_port_is_free_again_after_a_stop() -> None:
    async with served() as (_, address):
        _, writer = await asyncio.open_connection(*split_address(address))  # still open at the stop
    async with served():
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*split_address(address))
    writer.close()
