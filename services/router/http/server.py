"""Uvicorn on the router's event loop, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from baton.base.addresses import join_address
from services.common.config.router import ConnectionLimits
from services.common.rpc.grpc_server import bind_socket
from services.router.http.connections import Connections
from services.router.http.guard import HttpGuard
from services.router.http.named_calls import NamedCalls
from services.router.http.protocol import LimitedProtocol
from services.router.http.silent_clients import abort_silent, keep_alive
from services.router.request.call_trace import CallTrace

if TYPE_CHECKING:
    from baton.tls.files import TlsFiles
    from services.router.http.tls import TlsListener

_START_POLL_S = 0.005
_RELEASE_POLL_S = 0.02
_GRACE_S = 2
# How old the Date header of a response may be.
_DATE_S = 1.0
# The kernel's backlog. All of it may be accepted before the first connection is counted.
_BACKLOG = 256
# Uvicorn's log has exceptions and their texts, and what it has to say is in the router's own.
logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)


def http_app(routes: Sequence[BaseRoute], handlers: Mapping[Any, Any] | None = None) -> Starlette:
    """An application with these routes and exception handlers, without redirects of trailing slashes."""
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Waits for `stop`, where uvicorn's own loop polls ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._stopping.wait()

    def make_protocol(self) -> asyncio.Protocol:
        """The protocol of an accepted connection, as `startup` makes it."""
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()


class HttpServer:
    """Serves one application on one socket."""

    def __init__(
        self,
        app: ASGIApp,
        connections: Connections | None = None,
        allowed_hosts: Sequence[str] = (),
        tls: TlsFiles | None = None,
        trace_of: Callable[[Mapping[str, str]], CallTrace | None] = lambda headers: None,
    ) -> None:
        """`connections`: the listener's; None: with default limits. `allowed_hosts`: see HttpGuard. `tls`:
        None: plaintext. `trace_of`: see NamedCalls."""
        self.connections = connections or Connections(ConnectionLimits())
        self._guard = HttpGuard(app, allowed_hosts)
        config = uvicorn.Config(
            NamedCalls(self._guard, trace_of),
            http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, self.connections)),
            ws="none",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._tls: TlsListener | None = None
        if tls is not None:
            from services.router.http.tls import ServerContexts, TlsListener  # `cryptography` takes 50 ms

            self._tls = TlsListener(ServerContexts(tls), self.connections)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int, *, shared: bool = False) -> str:
        """Binds the port and returns `host:port`; `shared`: other processes listen on it too.
        BatonError(INVALID) if it is in use."""
        self._guard.listens_on(host)
        self._socket = bind_socket(host, port, shared=shared)
        keep_alive(self._socket)
        return join_address(host, self._socket.getsockname()[1])

    async def start(self) -> None:
        """Starts to serve; returns once connections are accepted."""
        assert self._socket is not None
        sockets = [self._socket] if self._tls is None else []
        self._serving = asyncio.create_task(self._server.serve(sockets))
        # Uvicorn has a flag and no event. This takes one or two iterations of the loop.
        while not (self._server.started or self._serving.done()):  # noqa: ASYNC110
            await asyncio.sleep(_START_POLL_S)
        if self._tls is not None:
            self._socket.listen(_BACKLOG)
            self._tls.start(self._socket, self._server.make_protocol)
        self._watching = asyncio.create_task(abort_silent(self._transports))

    def _transports(self) -> Iterator[asyncio.Transport]:
        for connection in self._server.server_state.connections:
            yield connection.transport

    async def release_connections(self, within_s: float) -> None:
        """Moves clients elsewhere before `stop`: a connection ends with the response to the next request of
        its client, or after `within_s` without one. Closed at once, it could meet that request on its way."""
        self.connections.leaving = True
        deadline = time.monotonic() + within_s
        while self.connections.idle and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_RELEASE_POLL_S)
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        """Stops listening, gives running responses a short time to end, and closes the rest."""
        if self._watching is not None:
            self._watching.cancel()
        if self._tls is not None:
            await self._tls.stop()
        self._server.stop()
        if self._serving is not None:
            await self._serving
