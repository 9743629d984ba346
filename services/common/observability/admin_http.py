"""The admin HTTP port of processes that serve no HTTP otherwise: /health, /ready and /metrics.

It needs no credentials and is for probes and Prometheus: every connection has one request, at most 8 KiB of
it, and a deadline; connections beyond `_MOST_CONNECTIONS` are closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple, Protocol

import httptools
from prometheus_client import CollectorRegistry

from baton.addresses import join_address
from services.common.observability.logs import get_log
from services.common.observability.metrics import render
from services.common.rpc.grpc_server import bind_socket

_HEAD_BYTES = 8 * 1024
_MOST_CONNECTIONS = 64
# From the connection to the answer's last byte. A scrape may wait for the engine for half of it.
_CONNECTION_S = 10.0
_JSON = "application/json"

log = get_log(__name__)


class Probes(Protocol):
    """What `/health` and `/ready` answer."""

    def unhealthy(self) -> str | None:
        """Why this process does not run as it should: "starting", or why it should be ended; None where it
        does."""

    def unready(self) -> str | None:
        """Why this process should get no new work; None where it may."""


class _Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = _JSON


class AdminHttp:
    """Serves the three paths between `start` and `stop`."""

    def __init__(self, probes: Probes, registry: CollectorRegistry) -> None:
        self._probes = probes
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # One scrape at a time: each takes a thread and reads all metrics.
        self._scrape = asyncio.Lock()

    async def start(self, host: str, port: int) -> str:
        """Serves; returns `host:port`. Raises BatonError(INVALID) where the address cannot be bound."""
        bound = bind_socket(host, port)
        self._server = await asyncio.start_server(self._connected, sock=bound, limit=_HEAD_BYTES)
        return join_address(host, bound.getsockname()[1])

    async def stop(self) -> None:
        """Closes the port and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECTION_S):
                writer.write(_encoded(await self._answer_to(reader)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()  # nothing where it is closed

    async def _answer_to(self, reader: asyncio.StreamReader) -> _Answer:
        try:
            request = _Request.parse(await reader.readuntil(b"\r\n\r\n"))
        except (asyncio.LimitOverrunError, httptools.HttpParserError):
            return _status(HTTPStatus.BAD_REQUEST)
        if request.method != "GET":
            return _status(HTTPStatus.NOT_FOUND)
        match request.path:
            case "/health":
                reason = self._probes.unhealthy()
                return _json(reason is None, {"status": "ok" if reason is None else reason})
            case "/ready":
                reason = self._probes.unready()
                ready = {"status": "ready"}
                return _json(
                    reason is None, ready if reason is None else {"status": "unavailable", "reason": reason}
                )
            case "/metrics":
                return await self._metrics(request.accept)
        return _status(HTTPStatus.NOT_FOUND)

    async def _metrics(self, accept: str) -> _Answer:
        async with self._scrape:
            try:
                body, content_type = await asyncio.to_thread(render, self._registry, accept)
            except Exception as error:
                log.warning("scrape_failed", error=str(error), kind=type(error).__name__)
                return _status(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _Answer(HTTPStatus.OK, body, content_type)


class _Request:
    """The head of a request, as httptools parses it."""

    def __init__(self) -> None:
        self.method = self.path = self.accept = ""

    @classmethod
    def parse(cls, head: bytes) -> _Request:
        """Raises httptools.HttpParserError."""
        request = cls()
        parser = httptools.HttpRequestParser(request)
        with contextlib.suppress(httptools.HttpParserUpgrade):
            parser.feed_data(head)
        request.method = parser.get_method().decode("ascii")
        return request

    def on_url(self, url: bytes) -> None:
        path = httptools.parse_url(url).path  # raises HttpParserInvalidURLError
        self.path = (path or b"").decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"accept":
            self.accept = value.decode("latin-1")


def _json(succeeded: bool, document: Mapping[str, str]) -> _Answer:
    status = HTTPStatus.OK if succeeded else HTTPStatus.SERVICE_UNAVAILABLE
    return _Answer(status, json.dumps(document).encode())


def _status(status: HTTPStatus) -> _Answer:
    return _Answer(status, json.dumps({"status": status.phrase.lower()}).encode())


def _encoded(answer: _Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"content-type: {answer.content_type}\r\n"
        f"content-length: {len(answer.body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + answer.body
