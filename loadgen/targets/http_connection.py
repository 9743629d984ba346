"""HTTP/1.1 connections with one exchange at a time, a pool of them, and a plain GET.

The bytes of a response are passed on within the event loop's callback in which they arrived, so their time is
the earliest that this process can know.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome
from loadgen.common.settings import TlsSettings
from loadgen.targets.stamped_socket import StampedSocket, connect
from loadgen.targets.target import Failure
from loadgen.targets.tls import ssl_context

CONNECT_S = 10.0
# Servers close connections that are idle for 5 s or more, so older ones are not reused.
IDLE_S = 2.0
_LONGEST_BODY = 16 * 1024 * 1024


class Listener(Protocol):
    """Receives one response. An exception that it raises ends the exchange."""

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        """Takes the status and headers; called before any body."""

    def on_body(self, data: bytes, late: float | None) -> None:
        """Takes a part of the body; it arrived at this machine `late` seconds ago, if the kernel reports
        that."""


class HttpConnection(asyncio.Protocol):
    """Used by one exchange at a time; `usable` says whether another may follow."""

    def __init__(self, stamped: StampedSocket) -> None:
        self._stamped = stamped
        self._late: float | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self.usable = False

    async def exchange(self, payload: bytes, listener: Listener) -> None:
        """Sends a request and returns at the end of its response. Raises Failure without one. Cancelling
        closes the connection, as HTTP has no other way to cancel.
        """
        assert self._transport is not None
        assert self._done is None, "one exchange at a time"
        self._listener = listener
        self._headers = {}
        self._done = asyncio.get_running_loop().create_future()
        self.usable = False
        try:
            self._transport.write(payload)
            await self._done
        finally:
            self._listener = self._done = None
            if not self.usable:
                self.close()

    def close(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass
        self.usable = True

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # no request is waiting
            return
        self._late = self._stamped.late_s()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(Failure(Outcome.MALFORMED, f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._listener is None or self._done is None or self._done.done():
            return
        status = self._parser.get_status_code() if self._headers else 0
        delimited = "content-length" in self._headers or "chunked" in self._headers.get(
            "transfer-encoding", ""
        )
        if status and not delimited and error is None:
            self._done.set_result(None)  # such a response ends with the connection
        else:
            self._fail(Failure(Outcome.RESET, "" if error is None else type(error).__name__))

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._listener is not None:
            self._listener.on_status(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._listener is not None:
            self._listener.on_body(data, self._late)

    def on_message_complete(self) -> None:
        self.usable = self._parser.should_keep_alive()
        # The next response gets a new parser.
        self._parser = httptools.HttpResponseParser(self)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()


class ConnectionPool:
    """A server's address and a pool of idle connections."""

    def __init__(self, url: str, clock: Callable[[], float], tls: TlsSettings | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadgenError(f"{url!r} is no address (http://HOST:PORT)")
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls: dict[str, Any] = {}
        if parts.scheme == "https":
            tls = tls or TlsSettings()
            self._tls = {"ssl": ssl_context(tls), "server_hostname": tls.server_name or self.host}
        self._clock = clock
        # Idle connections, the most recently used last, with the time since when.
        self._idle: deque[tuple[HttpConnection, float]] = deque()

    def head(self, method: str, path: str, more: str = "") -> str:
        """The first lines of a request, including the host."""
        return f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{more}"

    async def take(self) -> HttpConnection:
        """A connection for one exchange. Raises Failure where the server accepts none."""
        now = self._clock()
        while self._idle:
            connection, since = self._idle.pop()
            if connection.usable and now - since < IDLE_S:
                return connection
            connection.close()
        return await self._connect()

    def give(self, connection: HttpConnection) -> None:
        """Returns a connection after an exchange, usable or not."""
        if connection.usable:
            self._idle.append((connection, self._clock()))
        while self._idle and self._clock() - self._idle[0][1] > IDLE_S:
            self._idle.popleft()[0].close()

    async def close(self) -> None:
        """Closes the connections that are idle."""
        while self._idle:
            self._idle.pop()[0].close()
        await asyncio.sleep(0)  # lets the transports close

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                stamped = await connect(self.host, self.port)
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(stamped), sock=stamped, **self._tls
                )
        except (OSError, TimeoutError) as error:
            raise Failure(Outcome.CONNECT, type(error).__name__) from None
        return connection


class _Body:
    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def on_body(self, data: bytes, late: float | None) -> None:
        self.data += data
        if len(self.data) > _LONGEST_BODY:
            raise Failure(Outcome.MALFORMED, "too long")


async def get(url: str, timeout_s: float, headers: str = "", tls: TlsSettings | None = None) -> bytes:
    """The body of a 200. Raises Failure for anything else. `headers` are whole lines."""
    path = "/" + url.split("://", 1)[1].partition("/")[2]
    pool = ConnectionPool(url.removesuffix(path), time.monotonic, tls)
    body = _Body()
    try:
        async with asyncio.timeout(timeout_s):
            connection = await pool.take()
            try:
                await connection.exchange(f"{pool.head('GET', path, headers)}\r\n".encode(), body)
            finally:
                connection.close()
    except TimeoutError:
        raise Failure(Outcome.TIMEOUT) from None
    if body.status != 200:
        raise Failure(f"HTTP_{body.status}")
    return bytes(body.data)
