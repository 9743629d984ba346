"""The bounded, fair queue of requests that wait for a pair of workers with room.

The order is start-time fair queueing with the cost of one for each request: the requests of one client call
have successive turns, beginning at the turn that was served last, so that a call of a thousand choices and
a call of one that comes after it take turns. Within a turn, first come, first placed. A request that comes
back (refused by a worker, or on its next attempt) takes its old place, and the bound does not apply to it.

Of one client call at most `share` of the queue's places are taken at a time; its other requests wait until
one of these is placed.
"""

from __future__ import annotations

import asyncio
import bisect
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from baton.errors import BatonError, ErrorKind
from services.router.workers.block_wait import BlockWait
from services.router.workers.placement import nothing_cached

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.router.request.client_call import ClientCall
    from services.router.workers.block_wait import Place
    from services.router.workers.placement import Cached, Claim, Placement, PrefillClaim
    from services.router.workers.worker import Worker

ClaimT = TypeVar("ClaimT", bound="PrefillClaim")

# Requests that may wait for a place in the queue, for each of its places.
_HELD_BACK_A_PLACE = 4


@dataclass(order=True)
class _Waiter(Generic[ClaimT]):
    place: Place
    call: ClientCall = field(compare=False)
    pick: Callable[[], ClaimT | None] = field(compare=False)
    claim: asyncio.Future[ClaimT] = field(compare=False)

    def try_place(self) -> bool:
        """Claims what it waits for, if there is room."""
        claim = self.pick()
        if claim is not None:
            self.claim.set_result(claim)
        return claim is not None


class WaitingRoom:
    """At most `max_waiting` requests wait, each at most `timeout_s`; of one client call at most the part
    `share` of them."""

    def __init__(self, placement: Placement, max_waiting: int, timeout_s: float, share: float = 1.0) -> None:
        self._placement = placement
        self._max_waiting = max_waiting
        self._of_one_call = max(1, int(max_waiting * share))
        self.timeout_s = timeout_s
        self._waiting: list[_Waiter[Any]] = []
        self._blocks = BlockWait()
        # The turn of the request that was placed last, and how many have come.
        self._turn = 0
        self._arrivals = 0
        self._held_back = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting) + self._held_back

    def next_place(self, call: ClientCall) -> Place:
        """The place in the queue of a request that arrives now."""
        turn = max(self._turn, call.next_turn)
        call.next_turn = turn + 1
        self._arrivals += 1
        return turn, self._arrivals

    async def claim(
        self,
        place: Place,
        call: ClientCall,
        tokens: int,
        max_tokens: int,
        until: float,
        *,
        fresh: bool,
        cached: Cached = nothing_cached,
    ) -> Claim:
        """Waits for a pair with room for prompt and output until the loop's clock says `until`.

        The caller owns the claim and must release it, and must call `ended` once it has room at its decode
        worker or does not want any. Raises BatonError: OVERLOADED where the queue is full (`fresh` requests
        only) or every pair stayed so, UNAVAILABLE where there is none.
        """
        may_use = partial(self._blocks.may_use, place, tokens=tokens)
        pick = partial(self._placement.pick, tokens, max_tokens, cached, call.binding, may_use)
        return await self._wait(place, call, pick, until, fresh=fresh)

    async def claim_prefill(
        self, place: Place, call: ClientCall, tokens: int, until: float, *, fresh: bool
    ) -> PrefillClaim:
        """The same for a prompt that nothing follows: it needs no decode worker."""
        pick = partial(self._placement.pick_prefill, tokens, call.binding)
        return await self._wait(place, call, pick, until, fresh=fresh)

    def refused(self, place: Place, worker: Worker) -> None:
        """A decode worker had no room: if no older request waits for one, it is kept for this one."""
        self._blocks.refused(place, worker)

    def ended(self, place: Place) -> None:
        """The request at this place has its room, or does not want any more."""
        if self._blocks.holds(place):
            self._blocks.ended(place)
            self.place_waiting()

    async def _wait(
        self,
        place: Place,
        call: ClientCall,
        pick: Callable[[], ClaimT | None],
        until: float,
        *,
        fresh: bool,
    ) -> ClaimT:
        claimed: asyncio.Future[ClaimT] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(place, call, pick, claimed)
        if not fresh:
            return await self._in_queue(waiter, until)
        turnstile = await self._pass_turnstile(call, until)
        try:
            if len(self._waiting) >= self._max_waiting:
                raise BatonError(ErrorKind.OVERLOADED, f"{self._max_waiting} requests wait already")
            return await self._in_queue(waiter, until)
        finally:
            turnstile.release()

    async def _pass_turnstile(self, call: ClientCall, until: float) -> asyncio.Semaphore:
        """Waits until fewer of the call's requests are in the queue than its share."""
        turnstile = call.turnstile = call.turnstile or asyncio.Semaphore(self._of_one_call)
        if turnstile.locked():
            if self._held_back >= _HELD_BACK_A_PLACE * self._max_waiting:
                raise BatonError(ErrorKind.OVERLOADED, f"{self.waiting} requests wait already")
            self._held_back += 1
            try:
                async with asyncio.timeout_at(until):
                    await turnstile.acquire()
            except TimeoutError as error:
                raise self._too_long(call) from error
            finally:
                self._held_back -= 1
        else:
            await turnstile.acquire()
        return turnstile

    async def _in_queue(self, waiter: _Waiter[ClaimT], until: float) -> ClaimT:
        bisect.insort(self._waiting, waiter)
        self.place_waiting()
        claimed = waiter.claim
        if claimed.done():
            return claimed.result()
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(claimed)
        except TimeoutError as error:
            self._leave(waiter)
            raise self._too_long(waiter.call) from error
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def place_waiting(self) -> None:
        """Places requests in their order; called whenever a worker may take more.

        One that cannot be placed holds up those behind it that need the same pool, unless it waits for the
        blocks of a worker that is kept for it.
        """
        held_up: set[str | None] = set()
        index = 0
        while index < len(self._waiting):
            waiter = self._waiting[index]
            pool = waiter.call.binding.pool or self._placement.current_pool
            if pool in held_up:
                if not self._placement.several_pools:
                    return  # all of the rest would be held up too
                index += 1
            elif waiter.try_place():
                self._turn = max(self._turn, waiter.place[0])
                del self._waiting[index]
            else:
                if not self._blocks.holds(waiter.place):
                    held_up.add(pool)
                index += 1

    def _leave(self, waiter: _Waiter[Any]) -> None:
        """A request that stops waiting gives back what it was given meanwhile."""
        if waiter.claim.done():
            waiter.claim.result().release()
        else:
            self._waiting.remove(waiter)
            waiter.claim.cancel()

    def _too_long(self, call: ClientCall) -> BatonError:
        if self._placement.usable(call.binding):
            return BatonError(ErrorKind.OVERLOADED, f"no slot became free within {self.timeout_s:g} s")
        if call.binding.pool is None:
            return BatonError(ErrorKind.UNAVAILABLE, "no pair of prefill and decode workers is ready")
        message = "no workers are left that serve the model on which this request began"
        return BatonError(ErrorKind.UNAVAILABLE, message)
