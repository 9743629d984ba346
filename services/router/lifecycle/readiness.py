"""Tells whether this router would serve a request now, and waits for that to change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.router.lifecycle.dispatcher import Dispatcher
from services.router.placement.placement import Placement
from services.router.placement.ready_pairs import LastingPair


class Readiness:
    """The router is ready while it does not drain, all its processes answer, some pair of workers could
    serve a request or went a short while ago, and it holds its part of the tenants' limits."""

    def __init__(
        self,
        placement: Placement,
        dispatcher: Dispatcher,
        holds_limits: Callable[[], bool],
        hold_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hold_s`: seconds for which it stays ready once its last pair of workers has gone."""
        self._placement = placement
        self._pair = LastingPair(placement.usable, hold_s, clock)
        self._dispatcher = dispatcher
        self._holds_limits = holds_limits
        # The update that is due when the router ends to be ready, if no pair comes before.
        self._ends: asyncio.TimerHandle | None = None
        # Of the router's processes, where there are several.
        self._silence: str | None = None
        self._failure: str | None = None
        self._was_ready = False
        self._waiters: set[asyncio.Event] = set()

    def ready(self) -> bool:
        """True if a request would be served, or may wait for a worker that comes back."""
        return self.reason() is None

    def serving(self) -> bool:
        """True if a request would be served by the workers that there are now."""
        return self.ready() and self._placement.usable()

    def reason(self) -> str | None:
        """Says why the router is not ready, without names or addresses; None if it is."""
        if self._drains():
            return "the router is draining"
        if self._silence is not None:
            return self._silence
        if not self._pair.ready():
            return self._placement.unusable_reason()
        return None if self._holds_limits() else "other routers hold the tenants' limits"

    def unhealthy(self) -> str | None:
        """Says why the router should be restarted; None if it need not be."""
        return self._failure

    def set_processes(self, silence: str | None, failure: str | None) -> None:
        """Sets the faults of the router's other processes: some do not answer, or are not replaced."""
        self._silence, self._failure = silence, failure
        self.update()

    def _drains(self) -> bool:
        return self._dispatcher.draining or self._dispatcher.leaving

    def update(self) -> None:
        """Wakes those that wait if readiness has changed; call it when workers, draining, limits changed."""
        ready = self.ready()
        self._update_at_the_end()
        if ready != self._was_ready:
            self._was_ready = ready
            for waiter in self._waiters:
                waiter.set()

    def _update_at_the_end(self) -> None:
        """Has `update` called when the router ends to be ready without a pair."""
        if self._ends is not None:
            self._ends.cancel()
        left_s = self._pair.ends_in_s
        self._ends = None if left_s is None else asyncio.get_running_loop().call_later(left_s, self.update)

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
