"""Uvicorn on the router's own loop, without its signal handlers: the parent protocol has those."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import uvicorn

from services.common.grpc_server import bind_socket, join_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from starlette.applications import Starlette

_START_POLL_S = 0.005
_GRACE_S = 2
# How old the date in an answer's head may be.
_DATE_S = 1.0
# An idle connection is the client's to close: where we do it first, a request that it has just sent is lost.
# So this is longer than the usual pools keep one (httpx 5 s, aiohttp 15 s, load balancers 60 s).
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Uvicorn's looks ten times a second whether it is to stop; this one is told."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._stopping.wait()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()


class HttpServer:
    """Serves one application on one socket."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> str:
        """Takes the port; returns `host:port`. BatonError(INVALID) where it is in use."""
        self._socket = bind_socket(host, port)
        return join_address(host, self._socket.getsockname()[1])

    async def start(self) -> None:
        """Serves; returns once connections are answered."""
        assert self._socket is not None
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        # Uvicorn offers a flag and no event; this takes one turn of the loop or two.
        while not (self._server.started or self._serving.done()):  # noqa: ASYNC110
            await asyncio.sleep(_START_POLL_S)

    async def stop(self) -> None:
        """Stops listening, lets answers that run end for a moment, closes the rest."""
        self._server.stop()
        if self._serving is not None:
            await self._serving
