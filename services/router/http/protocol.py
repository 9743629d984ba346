"""One HTTP connection: uvicorn's httptools protocol with limits on size and time.

    idle      no byte of a request yet            closed after `idle_timeout_s`
    head      request line or headers             408 after `head_timeout_s`, 431 above their limits
    body      headers are complete, body is not   408 after `body_timeout_s`
    running   the request is being answered       no limit here: a request has its own deadline

A client that does not read its response is disconnected `read_grace_s` after the deadline that the
application puts into the scope's state (`deadline`, on the event loop's clock), or without one
`write_timeout_s` after it stopped reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.base.errors import BatonError, ErrorKind, FieldError
from services.router.http.connections import Connections, client_address
from services.router.http.errors import error_response
from services.router.http.framing import unchunked, without_offer
from services.router.http.half_closed import HalfClosed

# Bytes passed to the parser at once, so that an endless header is noticed early.
_SLICE = 16 * 1024
# Parts of one body. A chunk of one byte costs as much as one of 64 KiB.
_MAX_BODY_PARTS = 32_768
# After an error response the client's bytes are read for a while: a reset would destroy the response.
_LINGER_S = 1.0
_LINGER_BYTES = 1024 * 1024
# What is served above the connection limit.
HEALTH_PATHS = frozenset({"/health", "/ready"})
_RESERVE_HEAD_TIMEOUT_S = 2.0
# The reasons of refusals in metrics, by status.
_REASONS = {400: "not http", 408: "timeout", 431: "headers too large", 505: "not http"}
_VERSIONS = ("1.0", "1.1")


class _ViolationError(Exception):
    """The request exceeds a limit."""


class LimitedProtocol(HttpToolsProtocol):
    """Enforces `ConnectionLimits` on one connection, which is counted in `Connections`."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = connections
        self._limits = connections.limits
        self.address = ""
        self.buffered = 0
        self._reserved = False
        # An error response was sent; and what arrives is discarded.
        self._refused = False
        self._discarding = False
        self._discarded = 0
        self._violation: tuple[int, BatonError] | None = None
        # The request that is being served; pipelined ones wait for it.
        self._served: RequestResponseCycle | None = None
        # What the parser reads: "", "head" or "body"; and the phase that the timer is for.
        self._receiving = ""
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._head_count = self._body_parts = 0
        # Bytes since the parser reported a complete head, a part of a body or the end of a message.
        self._unreported = 0
        # The head that the parser has read offers another protocol, and is read again without that.
        self._offers = False
        self._half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection. Above the limit, or while the router stops, it is served health checks
        only."""
        super().connection_made(transport)
        self.address = client_address(self.client)
        if not self._connections.admit(self, self.loop.time()):
            self._reserved = True
            self._connections.refused["too many connections"] += 1
            self.app = _refuse_all_but_health(
                self.app, BatonError(ErrorKind.OVERLOADED, "too many connections")
            )
        elif self._connections.leaving:
            error = BatonError(ErrorKind.UNAVAILABLE, "the router is shutting down")
            self.app = _refuse_all_but_health(self.app, error)
        self._set_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends whatever runs for the connection."""
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._half_closed is not None:
            self._half_closed.close()
        self._connections.remove(self)
        if self._served is not None:  # uvicorn disconnects the last request, which may be another one
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parses the data slice by slice."""
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > _LINGER_BYTES:
                self.transport.abort()
            return
        for start in range(0, len(data), _SLICE):
            self._feed(data[start : start + _SLICE])
            if self._discarding or self.transport.is_closing():
                return

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it gets the answers to what it has sent completely. TLS cannot be closed
        by halves."""
        if self._receiving == "body" and self.pipeline:
            self.pipeline.popleft()  # it will never be complete
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering()
        elif self._receiving == "body":
            return False
        if self._refused or self.scheme == "https" or not self._running():
            return False
        self._receiving = ""
        self.cycle.keep_alive = False
        self._half_closed = HalfClosed(self.transport, self._may_continue)
        return True

    def _answering(self) -> RequestResponseCycle:
        assert self._served is not None
        return self._served

    def _may_continue(self) -> bool:
        served = self._answering()
        return not served.response_started and served.scope["http_version"] == "1.1"

    def _feed(self, data: bytes) -> None:
        while data:
            self._unreported += len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_offer(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                status, error = self._violation or (
                    400,
                    BatonError(ErrorKind.INVALID, "not a valid HTTP request"),
                )
                self._refuse(status, error)
                return
            else:
                if self._unreported > self._limits.max_head_bytes:
                    self._refuse(*self._head_too_large())
                return

    def _without_offer(self, rest: bytes) -> bytes:
        """Returns what is to be read after a head that offers another protocol, behind which its parser ends:
        the same head without the offer, and the rest."""
        if not self._offers:  # CONNECT, served as an ordinary request. What follows is another protocol.
            self._discarding = True
            self.cycle.keep_alive = False
            return b""
        self._offers = False
        version = self.parser.get_http_version().encode()
        head = without_offer(self.parser.get_method(), self.url, version, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return head + rest

    def on_message_begin(self) -> None:
        """Starts the limits of a request whose head begins to arrive."""
        super().on_message_begin()
        self._head_bytes = self._head_count = self._body_parts = 0
        self._receiving = "head"
        self._set_phase()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the request's target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, or a trailer after a chunked body."""
        self._head_count += 1
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the request, whose body is read as it arrives."""
        self._unreported = 0
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            self._violation = (505, BatonError(ErrorKind.INVALID, f"HTTP/{version} is not supported"))
            raise _ViolationError
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers = True
            return
        self._receiving = "body"
        super().on_headers_complete()
        if not self.pipeline:
            self._served = self.cycle
        if self._reserved or self._connections.leaving:
            self.cycle.keep_alive = False
        self._set_phase()

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body."""
        self._unreported = 0
        self._body_parts += 1
        if self._body_parts > _MAX_BODY_PARTS:
            message = f"a body has at most {_MAX_BODY_PARTS} parts"
            self._violation = (400, BatonError(ErrorKind.INVALID, message))
            raise _ViolationError
        super().on_body(body)
        if not self.cycle.response_complete:
            self._connections.set_buffered(self, self.buffered + len(body))

    def on_message_complete(self) -> None:
        """Ends the limits on receiving: the request is complete."""
        if self._offers:
            return
        self._unreported = 0
        self._receiving = ""
        super().on_message_complete()
        self._connections.set_buffered(self, 0)
        self._set_phase()

    def on_response_complete(self) -> None:
        """Ends a response that is completely in the transport's buffer."""
        self._connections.set_buffered(self, 0)
        self._served = self.pipeline[-1][0] if self.pipeline else self._served
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._set_phase()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, cast(Any, unchunked(app, cycle)) if old else app)

    def pause_writing(self) -> None:
        """Starts the write timeout: the client reads too slowly."""
        super().pause_writing()
        deadline = self._served.scope["state"].get("deadline") if self._served is not None else None
        timeout = self.loop.time() + self._limits.write_timeout_s
        until = timeout if deadline is None else deadline + self._limits.read_grace_s
        self._write_timer = self.loop.call_at(until, self._cut)

    def resume_writing(self) -> None:
        """Stops the write timeout: the client has read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def evict(self, message: str) -> None:
        """Closes a connection without a running request at once, because another one needs its descriptor."""
        self._connections.refused["evicted"] += 1
        if not self._refused and self._receiving:
            self._answer(503, BatonError(ErrorKind.OVERLOADED, message))
        self._refused = self._discarding = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        limits = self._limits
        if self._head_bytes > limits.max_head_bytes or self._head_count > limits.max_headers:
            self._violation = self._head_too_large()
            raise _ViolationError

    def _head_too_large(self) -> tuple[int, BatonError]:
        limits = self._limits
        message = (
            f"a request has at most {limits.max_headers} headers and {limits.max_head_bytes} bytes of them"
        )
        return 431, FieldError(message, code="headers_too_large")

    def _refuse(self, status: int, error: BatonError) -> None:
        """Sends an error response unless a response has begun, and closes the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = self._discarding = True
        self._connections.refused[_REASONS[status]] += 1
        if not self._answer(status, error):
            self.transport.abort()
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(_LINGER_S, self.transport.abort)

    def _answer(self, status: int, error: BatonError) -> bool:
        """Writes an error response; False if another response has begun. Wakes a handler that waits for the
        body."""
        cycle = self.cycle
        if self.pipeline or not (cycle is None or cycle.response_complete or not cycle.response_started):
            return False
        response = error_response(error, status)
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [name + b": " + value for name, value in headers]
        self.transport.write(STATUS_LINE[status] + b"\r\n".join([*lines, b"", response.body]))
        if cycle is not None:
            cycle.waiting_for_100_continue = False
            cycle.disconnected = True
            cycle.message_event.set()
        return True

    def _running(self) -> bool:
        cycle = self.cycle
        answers = cycle is not None and not cycle.response_complete and not cycle.more_body
        return bool(self.pipeline) or answers

    def _set_phase(self) -> None:
        """Updates the connection's phase and starts the phase's timer."""
        if self._refused:
            return
        if self.transport.is_closing():
            self._set_timer(self._limits.write_timeout_s, self.transport.abort)
            return
        phase = "running" if self._running() else self._receiving or "idle"
        if phase == self._phase:
            return
        if "running" in (phase, self._phase):
            self._connections.set_running(self, running=phase == "running", now=self.loop.time())
        self._phase = phase
        if phase == "running":
            self._clear_timer()
        elif phase == "idle":
            self._set_timer(self._limits.idle_timeout_s, self._close)
        elif phase == "head":
            limit_s = _RESERVE_HEAD_TIMEOUT_S if self._reserved else self._limits.head_timeout_s
            self._set_timer(limit_s, self._time_out)
        else:
            self._set_timer(self._limits.body_timeout_s, self._time_out)

    def _time_out(self) -> None:
        part = "headers" if self._phase == "head" else "body"
        message = f"the request's {part} did not arrive in time"
        self._refuse(408, FieldError(message, code="request_timeout"))

    def _cut(self) -> None:
        self._connections.refused["slow reader"] += 1
        self.transport.abort()

    def _close(self) -> None:
        """Closes the connection, after `write_timeout_s` even if the client does not read the buffer."""
        self.transport.close()
        self._set_timer(self._limits.write_timeout_s, self.transport.abort)

    def _set_timer(self, delay_s: float, action: Callable[[], None]) -> None:
        self._clear_timer()
        self._timer = self.loop.call_later(delay_s, action)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refuse_all_but_health(app: ASGIApp, error: BatonError) -> ASGIApp:
    """An application for connections above the limit, or to a router that stops."""

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") in HEALTH_PATHS:
            return await app(scope, receive, send)
        refusal = error_response(error)
        await refusal(scope, receive, send)

    return refusing
