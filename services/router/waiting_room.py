"""The bounded queue before the workers: first come, first placed.

Whoever is at the head is placed as soon as a pair has room. A request that comes back (refused
by a worker, or on its next attempt) takes its old place, and the bound does not apply to it.
"""

from __future__ import annotations

import asyncio
import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind

if TYPE_CHECKING:
    from services.router.placement import Claim, Placement


@dataclass(order=True)
class _Waiter:
    place: int
    tokens: int = field(compare=False)
    max_tokens: int = field(compare=False)
    claim: asyncio.Future[Claim] = field(compare=False)


class WaitingRoom:
    """At most `max_waiting` requests wait, each at most `timeout_s`."""

    def __init__(self, placement: Placement, max_waiting: int, timeout_s: float) -> None:
        self._placement = placement
        self._max_waiting = max_waiting
        self.timeout_s = timeout_s
        self._waiting: list[_Waiter] = []
        self._next_place = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def next_place(self) -> int:
        """The next place in the order of arrival."""
        self._next_place += 1
        return self._next_place

    async def claim(self, place: int, tokens: int, max_tokens: int, until: float, *, fresh: bool) -> Claim:
        """Waits for a pair with room until the loop's clock says `until`.

        The caller owns the claim and must release it. Raises BatonError: OVERLOADED where the room
        is full (asked of `fresh` requests only) or every pair stayed so, UNAVAILABLE where there is none.
        """
        if fresh and len(self._waiting) >= self._max_waiting:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._max_waiting} requests wait already")
        claimed: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(place, tokens, max_tokens, claimed)
        bisect.insort(self._waiting, waiter)
        self.place_waiting()
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(claimed)
        except TimeoutError as error:
            self._leave(waiter)
            raise self._too_long() from error
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def place_waiting(self) -> None:
        """Places from the head on; called whenever some worker may take more."""
        while self._waiting:
            head = self._waiting[0]
            claim = self._placement.pick(head.tokens, head.max_tokens)
            if claim is None:
                return
            del self._waiting[0]
            head.claim.set_result(claim)

    def _leave(self, waiter: _Waiter) -> None:
        """Whoever stops waiting gives back what it was given meanwhile."""
        if waiter.claim.done():
            waiter.claim.result().release()
        else:
            self._waiting.remove(waiter)
            waiter.claim.cancel()

    def _too_long(self) -> BatonError:
        if self._placement.usable():
            return BatonError(ErrorKind.OVERLOADED, f"no slot became free within {self.timeout_s:g} s")
        return BatonError(ErrorKind.UNAVAILABLE, "no pair of prefill and decode workers is ready")
