"""Whether this router would serve a request now, and waiting for that to change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.router.lifecycle.dispatcher import Dispatcher
from services.router.placement.placement import Placement


class Readiness:
    """The router is ready while it does not drain, all its processes answer, some pair of workers could
    serve a request, and it holds its part of the tenants' limits."""

    def __init__(
        self, placement: Placement, dispatcher: Dispatcher, holds_limits: Callable[[], bool]
    ) -> None:
        self._placement = placement
        self._dispatcher = dispatcher
        self._holds_limits = holds_limits
        # Of the router's processes, where there are several.
        self._silence: str | None = None
        self._failure: str | None = None
        self._was_ready = False
        self._waiters: set[asyncio.Event] = set()

    def ready(self) -> bool:
        """Whether a request would be served."""
        return self.reason() is None

    def reason(self) -> str | None:
        """Why a request would not be served, without names or addresses; None if it would be."""
        if self._drains():
            return "the router is draining"
        if self._silence is not None:
            return self._silence
        if not self._placement.usable():
            return self._placement.unusable_reason()
        return None if self._holds_limits() else "other routers hold the tenants' limits"

    def unhealthy(self) -> str | None:
        """Why the router should be restarted; None if it need not be."""
        return self._failure

    def set_processes(self, silence: str | None, failure: str | None) -> None:
        """Faults of the router's other processes: some do not answer, or are not replaced."""
        self._silence, self._failure = silence, failure
        self.update()

    def _drains(self) -> bool:
        return self._dispatcher.draining or self._dispatcher.leaving

    def update(self) -> None:
        """Wakes those that wait if readiness has changed; call it when workers, draining, limits changed."""
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
