"""The bounded queue before the workers: first come, first placed.

Whoever is at the head is placed as soon as a pair has room. A request that comes back (refused
by a worker, or on its next attempt) takes its old place, and the bound does not apply to it.
"""

from __future__ import annotations

import asyncio
import bisect
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from baton.errors import BatonError, ErrorKind
from services.router.placement import nothing_cached

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.router.placement import Cached, Claim, Placement, PrefillClaim

ClaimT = TypeVar("ClaimT", bound="PrefillClaim")


@dataclass(order=True)
class _Waiter(Generic[ClaimT]):
    place: int
    pick: Callable[[], ClaimT | None] = field(compare=False)
    claim: asyncio.Future[ClaimT] = field(compare=False)

    def try_place(self) -> bool:
        """Claims what it waits for, if there is room."""
        claim = self.pick()
        if claim is not None:
            self.claim.set_result(claim)
        return claim is not None


class WaitingRoom:
    """At most `max_waiting` requests wait, each at most `timeout_s`."""

    def __init__(self, placement: Placement, max_waiting: int, timeout_s: float) -> None:
        self._placement = placement
        self._max_waiting = max_waiting
        self.timeout_s = timeout_s
        self._waiting: list[_Waiter[Any]] = []
        self._next_place = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def next_place(self) -> int:
        """The next place in the order of arrival."""
        self._next_place += 1
        return self._next_place

    async def claim(
        self,
        place: int,
        tokens: int,
        max_tokens: int,
        until: float,
        *,
        fresh: bool,
        cached: Cached = nothing_cached,
    ) -> Claim:
        """Waits for a pair with room for prompt and output until the loop's clock says `until`.

        The caller owns the claim and must release it. Raises BatonError: OVERLOADED where the room
        is full (asked of `fresh` requests only) or every pair stayed so, UNAVAILABLE where there is none.
        """
        pick = partial(self._placement.pick, tokens, max_tokens, cached)
        return await self._wait(place, pick, until, fresh=fresh)

    async def claim_prefill(self, place: int, tokens: int, until: float, *, fresh: bool) -> PrefillClaim:
        """The same for a prompt that nothing follows: it needs no decode worker."""
        return await self._wait(place, lambda: self._placement.pick_prefill(tokens), until, fresh=fresh)

    async def _wait(
        self, place: int, pick: Callable[[], ClaimT | None], until: float, *, fresh: bool
    ) -> ClaimT:
        if fresh and len(self._waiting) >= self._max_waiting:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._max_waiting} requests wait already")
        claimed: asyncio.Future[ClaimT] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(place, pick, claimed)
        bisect.insort(self._waiting, waiter)
        self.place_waiting()
        if claimed.done():
            return claimed.result()
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
            if not self._waiting[0].try_place():
                return
            del self._waiting[0]

    def _leave(self, waiter: _Waiter[Any]) -> None:
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
