"""The bounded, fair queue of requests that wait for a pair of workers with room.

The order is start-time fair queueing with a cost of one for each request. The requests of one client call get
successive turns, from the turn that was served last, so that a call with a thousand choices and a later call
with one take turns. Within a turn, first come, first served. A request that returns (refused by a worker, or
for its next attempt) keeps its position, and the queue's bound does not apply to it.

One client call may have at most `share` of the queue's places at a time; its other requests wait outside
until one of these is placed.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from baton.errors import BatonError, ErrorKind
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.workers.block_wait import BlockWait, QueuePosition
from services.router.workers.early_refusal import Demand, too_late
from services.router.workers.placement import Cached, Claim, Placement, PrefillClaim, mean_context
from services.router.workers.worker import Worker

ClaimT = TypeVar("ClaimT", bound="PrefillClaim")

# Requests that may wait outside, for each place of the queue.
_OUTSIDE_PER_PLACE = 4


@dataclass
class QueueEntry:
    """A request's position in the queue, which it keeps from attempt to attempt."""

    call: ClientCall
    position: QueuePosition
    # Its limits, until it was placed first; and when its first token is due, on the event loop's clock.
    slo: Slo | None = None
    first_token_by: float | None = None
    # Whether it has waited before. The queue's bound applies to its first wait only.
    returning: bool = False


@dataclass(eq=False)
class _Waiter(Generic[ClaimT]):
    entry: QueueEntry
    pick: Callable[[], ClaimT | None]
    claim: asyncio.Future[ClaimT]
    # Predicted seconds of its prompt on one worker.
    prefill_s: float = 0.0

    def try_place(self) -> bool:
        """Claims what the request waits for, if there is room."""
        claim = self.pick()
        if claim is not None:
            self.claim.set_result(claim)
        return claim is not None


def _left_s(entry: QueueEntry) -> float | None:
    """Seconds until the request's first token is due; None without such a limit."""
    if entry.first_token_by is None:
        return None
    return entry.first_token_by - asyncio.get_running_loop().time()


class WaitingQueue:
    """At most `max_waiting` requests wait, each at most `timeout_s`."""

    def __init__(self, placement: Placement, max_waiting: int, timeout_s: float, share: float = 1.0) -> None:
        """`share`: the part of the queue that one client call may use."""
        self._placement = placement
        self._max_waiting = max_waiting
        self._max_per_call = max(1, int(max_waiting * share))
        self.timeout_s = timeout_s
        self._waiting: list[_Waiter[Any]] = []
        self._blocks = BlockWait()
        # The turn of the request that was placed last, and the number of arrivals.
        self._turn = 0
        self._arrivals = 0
        self._outside = 0

    @property
    def waiting(self) -> int:
        """Requests that wait, including those outside."""
        return len(self._waiting) + self._outside

    @property
    def placed(self) -> Counter[str]:
        """Requests that were placed, by who computes the prompt (`Placement.placed`)."""
        return self._placement.placed

    def enter(
        self,
        call: ClientCall,
        slo: Slo | None = None,
        waited_s: float = 0.0,
        deadline: float | None = None,
    ) -> QueueEntry:
        """The entry of a request that arrived `waited_s` ago. Where late requests are refused, its deadline
        (on the event loop's clock) is a limit of its first token too."""
        turn = max(self._turn, call.next_turn)
        call.next_turn = turn + 1
        self._arrivals += 1
        entry = QueueEntry(call, (turn, self._arrivals), slo)
        if slo is not None and slo.ttft_s is not None:
            entry.first_token_by = asyncio.get_running_loop().time() + slo.ttft_s - waited_s
        if deadline is not None and self._placement.refuse_late:
            entry.first_token_by = min(deadline, entry.first_token_by or deadline)
        return entry

    async def claim(
        self, entry: QueueEntry, tokens: int, max_tokens: int, until: float, cached: Cached
    ) -> Claim:
        """Waits for a pair with room for prompt and output, until `until` on the event loop's clock.

        `tokens`: to prefill. `max_tokens`: to generate. `cached`: see `Placement.pick`. The caller must
        release the claim, and call `ended` once decode has reserved its slot or the request is over. Raises
        BatonError: OVERLOADED if the queue is full (for the request's first claim) or no pair had room in
        time, RATE_LIMITED if it cannot meet its limits, UNAVAILABLE if there is no pair.
        """
        may_use = partial(self._blocks.may_use, entry.position, tokens=tokens)
        tpot_s = entry.slo.tpot_s if entry.slo is not None else None
        pick = partial(
            self._placement.pick, tokens, max_tokens, cached, entry.call, may_use, tpot_s,
            left_s=partial(_left_s, entry), behind=self._behind, returning=entry.returning,
        )  # fmt: skip
        if entry.returning or (entry.slo is None and entry.first_token_by is None):
            return await self._wait(entry, pick, until)
        demand = Demand(tokens, mean_context(tokens, max_tokens), entry.slo or Slo())
        ahead_s = sum(waiter.prefill_s for waiter in self._waiting)
        seconds = self._placement.check_in_time(
            demand, _left_s(entry), cached, entry.call, len(self._waiting), ahead_s
        )
        if not seconds or entry.first_token_by is None:
            return await self._wait(entry, pick, until, seconds)
        late_at = entry.first_token_by - seconds
        try:
            return await self._wait(entry, pick, min(until, late_at), seconds)
        except BatonError as error:
            timed_out = isinstance(error.__cause__, TimeoutError)
            if timed_out and late_at < until and error.kind is ErrorKind.OVERLOADED:
                raise too_late("no slot became free in time", 1.0) from error
            raise

    def _behind(self) -> int:
        """How many requests wait behind the one that is placed."""
        return max(0, len(self._waiting) - 1)

    async def claim_prefill(self, entry: QueueEntry, tokens: int, until: float) -> PrefillClaim:
        """Waits for a prefill worker alone, for a prompt without output."""
        pick = partial(self._placement.pick_prefill, tokens, entry.call)
        return await self._wait(entry, pick, until)

    def refused(self, entry: QueueEntry, worker: Worker) -> None:
        """A decode worker had no blocks: reserves it for this request, unless an older one waits for some."""
        self._blocks.refused(entry.position, worker)

    def ended(self, entry: QueueEntry) -> None:
        """The request has its slot, or is over."""
        if self._blocks.holds(entry.position):
            self._blocks.ended(entry.position)
            self.place_waiting()

    async def _wait(
        self, entry: QueueEntry, pick: Callable[[], ClaimT | None], until: float, prefill_s: float = 0.0
    ) -> ClaimT:
        claimed: asyncio.Future[ClaimT] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(entry, pick, claimed, prefill_s)
        if entry.returning:
            return await self._in_queue(waiter, until)
        entry.returning = True
        in_queue = await self._take_place(entry.call, until)
        try:
            if len(self._waiting) >= self._max_waiting:
                raise BatonError(ErrorKind.OVERLOADED, f"{self._max_waiting} requests wait already")
            return await self._in_queue(waiter, until)
        finally:
            in_queue.release()

    async def _take_place(self, call: ClientCall, until: float) -> asyncio.Semaphore:
        """Waits until the call has less than its share of the queue. The caller releases the semaphore."""
        in_queue = call.in_queue = call.in_queue or asyncio.Semaphore(self._max_per_call)
        if in_queue.locked():
            if self._outside >= _OUTSIDE_PER_PLACE * self._max_waiting:
                raise BatonError(ErrorKind.OVERLOADED, f"{self.waiting} requests wait already")
            self._outside += 1
            try:
                async with asyncio.timeout_at(until):
                    await in_queue.acquire()
            except TimeoutError as error:
                raise self._timed_out(call) from error
            finally:
                self._outside -= 1
        else:
            await in_queue.acquire()
        return in_queue

    async def _in_queue(self, waiter: _Waiter[ClaimT], until: float) -> ClaimT:
        bisect.insort(self._waiting, waiter, key=lambda one: one.entry.position)
        self.place_waiting()
        claimed = waiter.claim
        if claimed.done():
            return claimed.result()
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(claimed)
        except TimeoutError as error:
            self._leave(waiter)
            raise self._timed_out(waiter.entry.call) from error
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def place_waiting(self) -> None:
        """Places requests in order; call it whenever a worker may take more.

        A request that cannot be placed blocks those behind it that need the same pool, unless a worker is
        reserved for it.
        """
        blocked: set[str | None] = set()
        pools = self._placement.pools
        index = 0
        while index < len(self._waiting):
            waiter = self._waiting[index]
            pool = waiter.entry.call.pool or pools.current
            if pool in blocked:
                if not pools.several:
                    return  # all others need the same pool
                index += 1
            elif waiter.try_place():
                self._turn = max(self._turn, waiter.entry.position[0])
                del self._waiting[index]
            else:
                if not self._blocks.holds(waiter.entry.position):
                    blocked.add(pool)
                index += 1

    def _leave(self, waiter: _Waiter[Any]) -> None:
        """Removes a request that stops waiting, or releases what it has claimed meanwhile."""
        if waiter.claim.done():
            waiter.claim.result().release()
        else:
            self._waiting.remove(waiter)
            waiter.claim.cancel()

    def _timed_out(self, call: ClientCall) -> BatonError:
        if self._placement.usable(call):
            return BatonError(ErrorKind.OVERLOADED, f"no slot became free within {self.timeout_s:g} s")
        if call.pool is None:
            return BatonError(ErrorKind.UNAVAILABLE, "no pair of prefill and decode workers is ready")
        message = "no workers are left that serve the model on which this request began"
        return BatonError(ErrorKind.UNAVAILABLE, message)
