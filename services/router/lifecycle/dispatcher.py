"""Runs this router's requests, each in a task of its own, and drains them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from services.router.lifecycle.request_lifecycle import RequestLifecycle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.lifecycle.outbox import Outbox
    from services.router.lifecycle.request_lifecycle import LifecycleDeps
    from services.router.request.request import Request

_CANCELS_S = 5.0


class Dispatcher:
    """Starts requests and cancels them. A client that reads slowly delays no other."""

    def __init__(self, deps: LifecycleDeps) -> None:
        self._deps = deps
        # At most as many as the waiting queue and the workers' slots hold.
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self._stopping = False

    @property
    def running(self) -> int:
        """How many requests run or wait."""
        return len(self._tasks)

    @contextlib.asynccontextmanager
    async def run(self, request: Request, available: asyncio.Event) -> AsyncIterator[Outbox]:
        """Runs the request while the context is open; leaving it cancels what still runs, at the workers too.

        `available` is set whenever the outbox has something. Raises BatonError(UNAVAILABLE) while draining;
        later errors come through the outbox.
        """
        if self.draining:
            raise BatonError(ErrorKind.UNAVAILABLE, "the router is shutting down")
        lifecycle = RequestLifecycle(self._deps, request, available)
        task = asyncio.create_task(lifecycle.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield lifecycle.outbox
        finally:
            lifecycle.outbox.close()
            task.cancel()
            await asyncio.wait((task,))

    def set_draining(self, draining: bool) -> None:
        """Refuses new requests, or accepts them again unless the router stops; running ones continue."""
        self.draining = draining or self._stopping

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, gives running ones `timeout_s` to end, then cancels the rest."""
        self.draining = self._stopping = True
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._deps.cancels.drain(_CANCELS_S)
