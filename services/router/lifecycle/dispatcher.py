"""Runs the requests of a router, each a life of its own (`life`), and drains them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from services.router.lifecycle.request_lifecycle import Life, LifecycleDeps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.lifecycle.outbox import Outbox
    from services.router.request.request import Request
    from services.router.text.output_text import OutputText


class Dispatcher:
    """Runs requests, each as a task of its own, so that a door that reads slowly holds up nothing."""

    def __init__(self, deps: LifecycleDeps) -> None:
        self.deps = deps
        self.observations = deps.observations
        self.unread = deps.unread
        # Bounded by the waiting room and the workers' slots.
        self._lives: set[asyncio.Task[None]] = set()
        self.draining = False
        self._stopping = False

    @property
    def live(self) -> int:
        """How many requests run or wait."""
        return len(self._lives)

    @contextlib.asynccontextmanager
    async def run(self, request: Request, text: OutputText, news: asyncio.Event) -> AsyncIterator[Outbox]:
        """Starts the request; `news` tells that its outbox has some. Leaving the context ends it, wherever
        it is.

        Raises BatonError(UNAVAILABLE) while draining; later errors come through the outbox.
        """
        if self.draining:
            raise BatonError(ErrorKind.UNAVAILABLE, "the router is shutting down")
        life = Life(self.deps, request, text, news)
        task = asyncio.create_task(life.run())
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)
        try:
            yield life.outbox
        finally:
            life.outbox.close()
            task.cancel()
            await asyncio.wait((task,))

    def set_draining(self, draining: bool) -> None:
        """Refuses new requests, or accepts them again unless the router stops; running ones go on."""
        self.draining = draining or self._stopping

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, lets requests end for `timeout_s`, cancels the rest at the workers."""
        self.draining = self._stopping = True
        if self._lives:
            _, late = await asyncio.wait(self._lives, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.deps.cancels.drain(timeout_s=5.0)
