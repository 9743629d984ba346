"""The embedded Redis of a cluster without a configured one, restarted whenever it ends.

Its URL is known before it runs, so that it starts at the same time as the processes that use it. The port is
reserved by a socket that is bound but never listens, so that no other process gets it between two starts of
the server.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.base.errors import BatonError
from services.cli.common.messages import notify

if TYPE_CHECKING:
    from baton.state.embedded import EmbeddedServer

# It is restarted at once; if it keeps ending, after pauses that double.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LASTING_S = 10.0


class EmbeddedRedis:
    """Runs the server; call `stop` in the end. `url` contains the password and must not be logged."""

    def __init__(self, on_restart: Callable[[int], None] = lambda restarts: None) -> None:
        """`on_restart` is called after each restart, with the number of restarts."""
        self._reserved = socket.socket()
        # The server sets this too, and may then listen at the same port.
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port: int = self._reserved.getsockname()[1]
        self._password = secrets.token_urlsafe(32)
        self._server: EmbeddedServer | None = None
        self._supervising: asyncio.Task[None] | None = None
        self.restarts = 0
        self._on_restart = on_restart

    @property
    def url(self) -> str:
        """The server's URL, also before it runs."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    async def start(self) -> None:
        """Starts the server and returns once it answers. Raises BatonError(UNAVAILABLE) where it does not
        start."""
        await self._start()
        self._supervising = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Ends the server within two seconds and releases its port."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        self._reserved.close()

    async def _start(self) -> None:
        # Imported late: it takes a fifth of a second.
        from baton.state.embedded import EmbeddedServer

        self._server = await EmbeddedServer.start(port=self._port, password=self._password)

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while self._server is not None:
            began = loop.time()
            code = await self._server.wait()
            pause_s = (
                0.0 if loop.time() - began > LASTING_S else min(LONGEST_PAUSE_S, 2 * pause_s + FIRST_PAUSE_S)
            )
            notify(f"the embedded Redis {_how(code)}; restarting it, empty")
            await self._start_again(pause_s)
            self.restarts += 1
            self._on_restart(self.restarts)

    async def _start_again(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self._start()
            except BatonError as error:
                notify(f"the embedded Redis does not start: {error.message}; retrying")
                pause_s = LONGEST_PAUSE_S


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
