"""Clients that do not read what they asked for are disconnected shortly after their request's deadline."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2_grpc import RouterServiceStub
from services.common.rpc.grpc_server import bind_socket
from services.router.http import server
from services.router.http.protocol import LimitedProtocol
from tests.router.conftest import Site, SiteMaker, ids_request, until
from tests.router.http_client import events, http
from tests.router.raw_http import get, post

DEADLINE_S, GRACE_S = 2.0, 0.3
SETTINGS: dict[str, Any] = {
    "slots": 64,
    "request_timeout_s": DEADLINE_S,
    "connections": {"read_grace_s": GRACE_S, "write_timeout_s": 0.5},
}

Stalled = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's connections have as little room for answers as there may be."""

    def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
        listening = bind_socket(host, port, shared=shared)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(server, "bind_socket", bind)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Stalled:
    """Called, it returns once the router waits for a client to read."""
    waiting: set[LimitedProtocol] = set()
    pause, resume = LimitedProtocol.pause_writing, LimitedProtocol.resume_writing

    def paused(protocol: LimitedProtocol) -> None:
        waiting.add(protocol)
        pause(protocol)

    def resumed(protocol: LimitedProtocol) -> None:
        waiting.discard(protocol)
        resume(protocol)

    monkeypatch.setattr(LimitedProtocol, "pause_writing", paused)
    monkeypatch.setattr(LimitedProtocol, "resume_writing", resumed)
    return lambda: until(lambda: bool(waiting))


@contextlib.asynccontextmanager
async def deaf(here: Site, sent: bytes) -> AsyncIterator[socket.socket]:
    """A connection that sends and then does not read, with as little room for answers as there may be."""
    host, port = here.addresses["http"].rsplit(":", 1)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, (host, int(port)))
        await loop.sock_sendall(one, sent)
        yield one


@pytest.mark.parametrize("stream", [True, False])
async def test_an_unread_response_ends_after_its_deadline(
    site: SiteMaker, stalled: Stalled, stream: bool
) -> None:
    async with site(**SETTINGS) as here:
        many: dict[str, Any] = {"n": 8, "max_tokens": 60, "logprobs": 20, "stream": stream}
        started = time.monotonic()
        async with deaf(here, post(**many)):
            await stalled()
            await until(lambda: here.router.connections.count == 0, DEADLINE_S + GRACE_S + 1)
            assert time.monotonic() - started >= DEADLINE_S
            await here.quiet()


async def test_other_unread_responses_end_too(site: SiteMaker, stalled: Stalled) -> None:
    async with site(**SETTINGS) as here, deaf(here, get("/metrics") * 100):
        await stalled()
        await until(lambda: here.router.connections.count == 0, 2)


async def test_a_client_that_continues_to_read_in_time_gets_everything(
    site: SiteMaker, stalled: Stalled
) -> None:
    settings = {**SETTINGS, "request_timeout_s": 20.0}
    asked = post(n=8, max_tokens=100, logprobs=20, stream=True)
    async with site(**settings) as here, deaf(here, asked) as one:
        await stalled()
        await asyncio.sleep(0.7)  # longer than the write timeout, which is not for streams
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(one, 65536), 5)
            assert part
            data += part


async def test_an_unread_grpc_call_ends_after_its_deadline(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(**SETTINGS) as here:
        dispatcher, open_runs = here.router.dispatcher, []
        run = dispatcher.run

        @contextlib.asynccontextmanager
        async def counted(*arguments: Any) -> AsyncIterator[Any]:
            async with run(*arguments) as outbox:
                open_runs.append(1)
                try:
                    yield outbox
                finally:
                    open_runs.pop()

        monkeypatch.setattr(dispatcher, "run", counted)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(here.addresses["grpc"], options=options) as channel:
            call = RouterServiceStub(channel).Generate(ids_request([1, 2], 200, n=8, logprobs=20))
            await call.read()
            assert open_runs
            started = time.monotonic()
            await asyncio.sleep(DEADLINE_S - 0.3)
            assert open_runs  # it waits for its reader
            await until(lambda: not open_runs, DEADLINE_S + GRACE_S + 1)
            assert time.monotonic() - started < DEADLINE_S + GRACE_S + 1
            await here.quiet()
            call.cancel()


async def test_unread_output_takes_bounded_memory(site: SiteMaker, stalled: Stalled) -> None:
    """The outputs that hold the most give way; a client that reads is not touched."""
    limits = {**SETTINGS["connections"], "max_unread_mb": 1}
    async with site(**{**SETTINGS, "request_timeout_s": 20.0, "connections": limits}) as here:
        unread = here.router.unread
        async with deaf(here, post(n=32, max_tokens=240, logprobs=20, stream=True)), http(here) as client:
            most, tokens = 0, 0
            await stalled()
            async for chunk in events(client, max_tokens=200, return_token_ids=True):
                most = max(most, unread.total_bytes)
                tokens += len(chunk["choices"][0]["token_ids"])
            assert tokens == 200
            await until(lambda: here.worker("decode-0").decode.used_slots == 0)
            assert 1 << 19 < most <= 1 << 20
            await until(lambda: here.router.dispatcher.running == 0)
        await until(lambda: here.router.connections.count == 0)
        await until(lambda: unread.total_bytes == 0)
