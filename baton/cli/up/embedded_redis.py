"""The Redis of a cluster that was told of none: an embedded server, started again whenever it ends.

Its URL is known before it runs, so that it starts beside the processes that will use it. Their port is kept
by a socket of ours that never listens: nobody else gets it, not even between two starts of the server.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.cli.common.messages import say
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.state.embedded import EmbeddedServer

# One that ends is started again at once; one that goes on ending, after ever longer pauses.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LASTING_S = 10.0


class OwnRedis:
    """Whoever makes it must `stop` it. `url` has the password: it is no text for a log."""

    def __init__(self) -> None:
        self._place = socket.socket()
        # The server, which sets this too, may then listen where we are bound.
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self._port: int = self._place.getsockname()[1]
        self._password = secrets.token_urlsafe(32)
        self._server: EmbeddedServer | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.restarts = 0
        # Called after each restart, with their number.
        self.on_restart: Callable[[int], None] = lambda restarts: None

    @property
    def url(self) -> str:
        """Where it is, or will be."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    async def start(self) -> None:
        """Returns once it answers, and keeps it running; BatonError(UNAVAILABLE) where it does not start."""
        await self._start()
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ends it within two seconds, and gives its port back."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        self._place.close()

    async def _start(self) -> None:
        # A fifth of a second of imports, which nobody waits for here.
        from baton.state.embedded import EmbeddedServer

        self._server = await EmbeddedServer.start(port=self._port, password=self._password)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while self._server is not None:
            began = loop.time()
            code = await self._server.wait()
            pause_s = (
                0.0 if loop.time() - began > LASTING_S else min(LONGEST_PAUSE_S, 2 * pause_s + FIRST_PAUSE_S)
            )
            say(f"the embedded Redis {_how(code)}; starting it again, empty")
            await self._start_again(pause_s)
            self.restarts += 1
            self.on_restart(self.restarts)

    async def _start_again(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self._start()
            except BatonError as error:
                say(f"the embedded Redis does not start: {error.message}; trying again")
                pause_s = LONGEST_PAUSE_S


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
