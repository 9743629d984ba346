"""Whether this router would serve a request now, and waiting for that to change."""

from __future__ import annotations

import asyncio

from services.router.lifecycle.dispatcher import Dispatcher
from services.router.workers.placement import Placement


class Readiness:
    """The router is ready while it does not drain and some pair of workers could serve a request."""

    def __init__(self, placement: Placement, dispatcher: Dispatcher) -> None:
        self._placement = placement
        self._dispatcher = dispatcher
        self._was_ready = False
        self._waiters: set[asyncio.Event] = set()

    def ready(self) -> bool:
        """Whether a request would be served."""
        return self._placement.usable() and not self._drains()

    def reason(self) -> str | None:
        """Why a request would not be served, without names or addresses; None if it would be."""
        if self._drains():
            return "the router is draining"
        return None if self._placement.usable() else self._placement.unusable_reason()

    def _drains(self) -> bool:
        return self._dispatcher.draining or self._dispatcher.leaving

    def update(self) -> None:
        """Wakes those that wait if readiness has changed; call it when workers or draining changed."""
        ready = self.ready()
        if ready != self._was_ready:
            self._was_ready = ready
            for waiter in self._waiters:
                waiter.set()

    async def wait(self, *, ready: bool) -> None:
        """Returns once the router is ready, or is not."""
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            while self.ready() != ready:
                changed.clear()
                await changed.wait()
        finally:
            self._waiters.discard(changed)
