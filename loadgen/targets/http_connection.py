"""One HTTP/1.1 connection with one exchange at a time.

The bytes of a response are passed on within the event loop's callback in which they arrived, so their time is
the earliest that this process can know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from loadgen.common.record import Outcome
from loadgen.targets.stamped_socket import StampedSocket
from loadgen.targets.target import Failure


class Listener(Protocol):
    """Receives one response. An exception that it raises ends the exchange."""

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        """Called before any body."""

    def on_body(self, data: bytes, late: float | None) -> None:
        """A part of the body; it arrived at this machine `late` seconds ago, if the kernel reports that."""


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
