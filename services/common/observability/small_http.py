"""A small HTTP server for probes and scrapes, which strangers cannot occupy: it has no credentials, and
anybody who reaches its port may connect.

Every connection has one request of at most 8 KiB, which has to arrive within `HEAD_S`, and all of it a
deadline. Where too many wait for their request, the one that has waited longest is closed for a new one,
since a probe sends its request at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import httptools

from baton.base.addresses import join_address
from services.common.rpc.grpc_server import bind_socket

_HEAD_BYTES = 8 * 1024
# Connections whose request has not arrived.
MOST_WAITING = 64
HEAD_S = 2.0
# From the connection to the answer's last byte. A scrape may wait for the engine for half of it.
CONNECTION_S = 10.0
# Turns of the event loop in which a connection that was just accepted is known, aborted and closed.
_TURNS_TO_CLOSE = 6
_JSON = "application/json"


class Answer(NamedTuple):
    """A response of the server."""

    status: HTTPStatus
    body: bytes
    content_type: str = _JSON
    more_headers: tuple[tuple[str, str], ...] = ()


class Request:
    """The head of a request, as httptools parses it."""

    def __init__(self) -> None:
        self.method = self.path = self.query = ""
        self.headers: dict[str, str] = {}
        self._hosts = 0

    @classmethod
    def parse(cls, head: bytes) -> Request:
        """Parses a request's head. Raises httptools.HttpParserError."""
        request = cls()
        parser = httptools.HttpRequestParser(request)
        with contextlib.suppress(httptools.HttpParserUpgrade):
            parser.feed_data(head)
        request.method = parser.get_method().decode("ascii")
        if request._hosts > 1 or (not request._hosts and parser.get_http_version() == "1.1"):
            raise httptools.HttpParserError("a request has one Host header")
        return request

    def on_url(self, url: bytes) -> None:
        parsed = httptools.parse_url(url)  # raises HttpParserInvalidURLError
        self.path = (parsed.path or b"").decode("latin-1")
        self.query = (parsed.query or b"").decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._hosts += name.lower() == b"host"
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")


Handler = Callable[[Request], Awaitable[Answer]]


class SmallHttp:
    """Serves one handler between `start` and `stop`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._stopped = False
        self._connections: set[asyncio.Task[None]] = set()
        # Those whose request has not arrived, oldest first.
        self._waiting: dict[asyncio.StreamWriter, None] = {}

    async def start(self, host: str, port: int) -> str:
        """Starts to serve; returns `host:port`. Raises BatonError(INVALID) if the address cannot be bound."""
        bound = bind_socket(host, port)
        self._server = await asyncio.start_server(self._connected, sock=bound, limit=_HEAD_BYTES)
        return join_address(host, bound.getsockname()[1])

    async def stop(self) -> None:
        """Closes the port and all connections."""
        self._stopped = True
        if self._server is not None:
            await _close(self._server)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for writer in self._waiting:  # of tasks that were cancelled before they began
            writer.transport.abort()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:  # it was accepted just before
            writer.transport.abort()
            return
        if len(self._waiting) >= MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        self._waiting[writer] = None
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECTION_S):
                writer.write(_encoded(await self._answer_to(reader, writer)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._waiting.pop(writer, None)
            writer.transport.abort()  # nothing where it is closed

    async def _answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            self._waiting.pop(writer, None)
            return await self._handler(Request.parse(head))
        except (asyncio.LimitOverrunError, httptools.HttpParserError):
            return status_answer(HTTPStatus.BAD_REQUEST)


class Scrapes:
    """Makes answers that take a thread and read all metrics: one at a time, and few that wait."""

    # Scrapers that read, or wait for their turn; others are refused.
    _MOST = 16

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._count = 0

    async def make(self, answer: Callable[[], Answer]) -> Answer:
        """Calls `answer` in a thread."""
        if self._count >= self._MOST:
            return status_answer(HTTPStatus.SERVICE_UNAVAILABLE)
        self._count += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(answer)
        finally:
            self._count -= 1


async def _close(server: asyncio.Server) -> None:
    """Closes a server's port. Python 3.11's asyncio drops, without closing it, a connection whose server
    closes between its acceptance and its transport: so accepting ends first, and accepted connections get
    their transport."""
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        with contextlib.suppress(RuntimeError):  # uvloop, which has no such gap
            loop.remove_reader(listening.fileno())
    for _ in range(_TURNS_TO_CLOSE):
        await asyncio.sleep(0)
    server.close()


def json_answer(succeeded: bool, document: Mapping[str, str]) -> Answer:
    """A document with status 200, or 503."""
    status = HTTPStatus.OK if succeeded else HTTPStatus.SERVICE_UNAVAILABLE
    return Answer(status, json.dumps(document).encode())


def status_answer(status: HTTPStatus) -> Answer:
    """An answer that has nothing but its status."""
    return Answer(status, json.dumps({"status": status.phrase.lower()}).encode())


def _encoded(answer: Answer) -> bytes:
    headers = (
        ("content-type", answer.content_type),
        *answer.more_headers,
        ("content-length", str(len(answer.body))),
        ("connection", "close"),
    )
    lines = [f"{name}: {value}" for name, value in headers]
    first = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1") + answer.body
