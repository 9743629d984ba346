"""The bounded, fair queue of requests that wait for a pair of workers with room.

`request_order` says in which order they are placed. A request that returns (refused by a worker, or for its
next attempt) was charged for when it was placed first: it goes before all that were not placed yet, the
oldest of them first, and the queue's bound does not apply to it.

Tenants share the queue's places (`tenants.places`), and one client call may have at most `share` of them at
a time; its other requests wait outside until one of these is placed.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.base.errors import BatonError, ErrorKind
from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.forecast import USUAL_OUTPUT_TOKEN_COST, usual_output
from services.router.placement.placement import Cached, NoRoom, Placement
from services.router.queue.block_wait import BlockWait
from services.router.queue.drain_rate import DrainRate
from services.router.queue.entry import QueueEntry
from services.router.queue.entry_check import EntryCheck
from services.router.queue.held import Held
from services.router.queue.passing import Passing, may_pass
from services.router.queue.request_order import RequestOrder
from services.router.queue.siblings import NoSiblings, SiblingQueues
from services.router.queue.waiter import ClaimT, Waiter
from services.router.request.limits import Needs
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.tenants.places import Places
from services.router.workers.backlog import SecondsByLength
from services.router.workers.other_claims import FIRST, Precedence
from services.router.workers.worker import Worker

# Requests that may wait outside, for each place of the queue.
_OUTSIDE_PER_PLACE = 4
_PLACES = "queue_places"
# Number of requests waiting for a worker that has their prompts cached that are tried each time; while there
# are more, those behind them wait, too.
_MOST_KEPT = 16
# A late request waits behind others for this share of the time that it may wait at all.
_YIELDING_SHARE = 0.5
# Seconds in which a process placed no request of some priority after which the next one goes before more
# urgent ones of sibling processes.
FLOOR_S = 1.0
# A timer may fire by its clock's resolution too early.
_TICK_S = 1e-3


class WaitingQueue:
    """The queue of requests for workers: at most `max_waiting` wait, each at most `timeout_s`."""

    def __init__(self, placement: Placement, max_waiting: int, timeout_s: float, share: float = 1.0) -> None:
        """`share`: the part of the queue that one client call may use."""
        self._placement = placement
        self._max_per_call = max(1, int(max_waiting * share))
        self.timeout_s = timeout_s
        self._waiters: dict[QueueEntry, Waiter[Any]] = {}
        self._order = RequestOrder()
        self._drain = DrainRate()
        # Those that were placed before, the oldest first.
        self._returned: list[QueueEntry] = []
        self._placed = 0
        # Why the last request that was not placed was not.
        self._last_no_room = NoRoom.DECODE
        self._blocks = BlockWait()
        self._held = Held()
        # Called when `first_waiting` may have changed, except by placements.
        self.on_wait: Callable[[], None] = lambda: None
        self.siblings: SiblingQueues = NoSiblings()
        self._places = Places(max_waiting, _PLACES, "requests wait already")
        self._check = EntryCheck(
            placement, self._order, self._drain, lambda: len(self._returned),
            lambda: self.siblings.queued, timeout_s,
        )  # fmt: skip
        self._outside = Places(_OUTSIDE_PER_PLACE * max_waiting, _PLACES, "requests wait already")

    @property
    def waiting(self) -> int:
        """Requests that wait, including those outside."""
        return len(self._waiters) + self._outside.taken

    @property
    def prompts(self) -> SecondsByLength:
        """Seconds of the prompts of all that wait for their first placement, where late ones are refused."""
        return self._order.prompts

    @property
    def first_waiting(self) -> Precedence | None:
        """The precedence of the request that is placed next, once there is room; None where there is none, or
        it is late."""
        pools = (None, self._placement.pools.current)
        for entry in itertools.chain(self._returned, (self._order.first,)):
            if entry is None or entry.call.pool not in pools or self._blocks.holds(entry.number):
                continue
            if self._waiters[entry].unfit == self._placement.pools.version:
                continue
            return None if entry.late else self._precedence(entry)
        return None

    def _precedence(self, entry: QueueEntry) -> Precedence:
        """The precedence of a request over those of sibling processes: its own, and once in a while that of
        the most urgent."""
        own = entry.precedence
        placed_at = self._order.last_placed_at(entry.call.priority)
        if asyncio.get_running_loop().time() - max(entry.since, placed_at) < FLOOR_S:
            return own
        return FIRST._replace(since=own.since)

    @property
    def placed(self) -> Counter[str]:
        """Requests that were placed, by who computes the prompt (`Placement.placed`)."""
        return self._placement.placed

    @property
    def refused_early(self) -> Counter[str]:
        """Requests that were refused before their time was up, by what would not have been kept."""
        return self._check.refused

    def enter(
        self,
        call: ClientCall,
        slo: Slo | None = None,
        waited_s: float = 0.0,
        deadline: float | None = None,
    ) -> QueueEntry:
        """The entry of a request that arrived `waited_s` ago. Where late requests are refused, its deadline
        (on the event loop's clock) is a limit of its first token too."""
        since = asyncio.get_running_loop().time() - waited_s
        entry = QueueEntry(call, self._order.arrival(call), since, slo, deadline=deadline)
        if slo is not None and slo.ttft_s is not None:
            entry.first_token_by = since + slo.ttft_s
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
        time, RATE_LIMITED if it cannot meet its limits, DEADLINE if it cannot have its first token before
        its deadline, UNAVAILABLE if there is no pair.
        """
        needs = entry.needs(tokens, tokens + max_tokens)
        entry.prompt = tokens
        entry.tokens = tokens + USUAL_OUTPUT_TOKEN_COST * usual_output(max_tokens)
        self._set_limits(entry, tokens, max_tokens, until, cached)
        pick = partial(
            self._placement.pick, tokens, max_tokens, cached, entry.call,
            partial(self._may_use, entry, tokens), entry.tpot_s, needs=needs, failed=entry.failed,
            may_prefill=self._held.may_prefill, due=entry.due, precedence=partial(self._precedence, entry),
            behind=self._behind, returning=entry.returning,
            by_order=partial(may_pass, self._placement, self._order), waits=entry.waits,
        )  # fmt: skip
        if entry.returning:
            return await self._wait(entry, pick, needs, until)
        late_at = self._check.too_late_at(entry, tokens, max_tokens, cached)
        try:
            return await self._wait(entry, pick, needs, min(until, late_at))
        except BatonError as error:
            timed_out = isinstance(error.__cause__, TimeoutError)
            if timed_out and late_at < until and error.kind is ErrorKind.OVERLOADED:
                raise self._check.too_late(entry) from error
            raise

    def _set_limits(
        self, entry: QueueEntry, tokens: int, max_tokens: int, until: float, cached: Cached
    ) -> None:
        """Sets when a request is late, and until when it waits behind others then, and for room under its
        TPOT limit: so that it ends before its deadline and is placed before `until`. It does neither where
        late requests are refused, or where it was late from the beginning. The arguments are those of
        `claim`."""
        if self._placement.refuse_late or entry.first_token_by is None or entry.returning:
            return
        if entry.deadline is not None:
            until = min(until, entry.deadline - max_tokens * (entry.tpot_s or 0.0))
        prompt_s = self._placement.longest_first_token_s(tokens, cached, entry.call)
        late_at = min(entry.first_token_by, until) - prompt_s
        if late_at > asyncio.get_running_loop().time():
            entry.late_at = late_at
            entry.waits_until = late_at + _YIELDING_SHARE * (until - late_at)

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill worker."""
        return len(self._waiters) if self._last_no_room is NoRoom.PREFILL else 0

    def _behind(self) -> int:
        """Requests of all processes that wait for a prefill worker behind the one that is placed."""
        return max(0, self.waiting_for_prefill - 1) + self.siblings.waiting_for_prefill

    async def claim_prefill(self, entry: QueueEntry, tokens: int, until: float) -> PrefillClaim:
        """Waits for a prefill worker alone, for a prompt without output."""
        entry.prompt = entry.tokens = tokens
        needs = entry.needs(tokens, tokens)
        pick = partial(
            self._placement.pick_prefill, tokens, entry.call,
            needs=needs, failed=entry.failed, may_prefill=self._held.may_prefill,
        )  # fmt: skip
        return await self._wait(entry, pick, needs, until)

    def has_other_pair(self, entry: QueueEntry, computed: int, total: int) -> bool:
        """True if a pair could serve a request on which no attempt of it has failed; sizes as of `Needs`."""
        return self._placement.fits(entry.needs(computed, total), entry.call, entry.failed)

    def _may_use(self, entry: QueueEntry, tokens: int, worker: Worker) -> bool:
        """True if a request may be placed on a decode worker with a free slot."""
        return self._held.may_decode(worker) and self._blocks.may_use(entry.number, worker, tokens)

    def refused(self, entry: QueueEntry, worker: Worker) -> None:
        """Reserves a worker that had no blocks for this request, unless an older one waits for some."""
        self._blocks.refused(entry.number, worker)

    def ended(self, entry: QueueEntry) -> None:
        """Ends the entry of a request that has its slot, or is over."""
        if self._blocks.holds(entry.number):
            self._blocks.ended(entry.number)
            self.place_waiting()

    async def _wait(
        self, entry: QueueEntry, pick: Callable[[], ClaimT | NoRoom], needs: Needs, until: float
    ) -> ClaimT:
        claimed: asyncio.Future[ClaimT] = asyncio.get_running_loop().create_future()
        limited = self._placement.refuse_late and entry.tpot_s is not None
        waiter = Waiter(pick, claimed, needs, limited, asyncio.get_running_loop().time())
        if entry.returning:
            return await self._in_queue(entry, waiter, until)
        tenant = entry.call.tenant
        with contextlib.nullcontext() if tenant is None else tenant.count_wait(waiter.since):
            in_queue = await self._take_place(entry.call, until)
            try:
                with self._places.hold(tenant):
                    return await self._in_queue(entry, waiter, until)
            finally:
                in_queue.release()

    async def _take_place(self, call: ClientCall, until: float) -> asyncio.Semaphore:
        """Waits until the call has less than its share of the queue. The caller releases the semaphore."""
        in_queue = call.in_queue = call.in_queue or asyncio.Semaphore(self._max_per_call)
        if in_queue.locked():
            with self._outside.hold(call.tenant):
                try:
                    async with asyncio.timeout_at(until):
                        await in_queue.acquire()
                except TimeoutError as error:
                    raise self._timed_out(call) from error
        else:
            await in_queue.acquire()
        return in_queue

    async def _in_queue(self, entry: QueueEntry, waiter: Waiter[ClaimT], until: float) -> ClaimT:
        self._waiters[entry] = waiter
        self._drain.update(asyncio.get_running_loop().time(), waiting=True)
        if entry.returning:
            bisect.insort(self._returned, entry, key=lambda one: one.number)
        else:
            self._order.add(entry)
        self.place_waiting()
        claimed = waiter.claim
        if claimed.done():
            return claimed.result()
        self.on_wait()
        timers = []
        if entry.may_wait():
            call_at = asyncio.get_running_loop().call_at
            timers = [
                call_at(entry.late_at, self._set_late, entry, True),
                call_at(entry.waits_until + _TICK_S, self._set_late, entry, False),
            ]
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(claimed)
        except TimeoutError as error:
            self._leave(entry, claimed)
            raise self._timed_out(entry.call, waiter.needs) from error
        except asyncio.CancelledError:
            self._leave(entry, claimed)
            raise
        finally:
            for timer in timers:
                timer.cancel()

    def _set_late(self, entry: QueueEntry, late: bool) -> None:
        """Marks or unmarks a request as late, and moves it behind or among those that are not."""
        if entry in self._waiters:
            self._order.set_late(entry, late)
            self.on_wait()
            self.place_waiting()

    def place_waiting(self) -> None:
        """Places requests in order; call it whenever a worker may take more.

        A request that cannot be placed blocks those behind it from the workers that it fits (`held`), unless
        a worker is reserved for it. One that its own limits may keep from being placed blocks only those of
        its tenant and priority, where others wait too; while it may still wait for room under them, it blocks
        only those that need as much room. Those that wait for a worker that has their prompts cached block
        none, up to `_MOST_KEPT` of them.
        """
        self._held.clear()
        blocked: set[str | None] = set()
        # By pool, the loosest TPOT limit under which no worker has room.
        full: dict[str | None, float] = {}
        # How many wait for a worker that has their prompts cached.
        kept = 0
        pools = self._placement.pools
        now = asyncio.get_running_loop().time()
        passing = Passing(now) if may_pass(self._placement, self._order) else None
        for entry in itertools.chain(list(self._returned), self._order.walk()):
            pool = entry.call.pool or pools.current
            if pool in blocked:
                if not pools.several:
                    return  # all others need the same pool
                continue
            waiter = self._waiters[entry]
            if waiter.unfit == pools.version:
                continue
            if passing is not None and passing.over:
                return
            if passing is not None and not passing.may_try(entry.prompt):
                continue
            limit = entry.tpot_s if entry.may_wait() else None
            if limit is not None and limit <= full.get(pool, 0.0):
                continue
            placed = waiter.pick()
            if not isinstance(placed, NoRoom):
                self._place(entry, placed)
                continue
            if placed is NoRoom.UNFIT:
                waiter.unfit = pools.version
                continue
            self._last_no_room = placed
            if placed is NoRoom.CACHED:
                kept += 1
                if kept == _MOST_KEPT:
                    return
            elif limit is not None and placed is NoRoom.DECODE:
                full[pool] = limit
            elif waiter.limited and not entry.returning and self._order.flows > 1:
                self._order.pass_flow(entry)
            elif self._blocks.holds(entry.number):
                continue
            elif passing is not None and placed is NoRoom.PREFILL and not entry.returning:
                passing.waits(entry.prompt, waiter.since)
            elif self._held.hold(placed, *self._placement.fitting(waiter.needs, entry.call)):
                blocked.add(pool)

    def _place(self, entry: QueueEntry, claim: PrefillClaim) -> None:
        """Ends the wait of a request that has what it waits for."""
        self._waiters.pop(entry).claim.set_result(claim)
        now = asyncio.get_running_loop().time()
        entry.call.placed_at = now
        if entry.call.tenant is not None:
            entry.call.tenant.placed_at = now
        if self._waiters:
            self._drain.placed(now, entry.tokens)
        else:
            self._drain.update(now, waiting=False)
        if entry.returning:
            self._returned.remove(entry)
        else:
            self._order.placed(entry, claim.cost, now)
            self._placed += 1
            entry.number = self._placed

    def _leave(self, entry: QueueEntry, claimed: asyncio.Future[ClaimT]) -> None:
        """Removes a request that stops waiting, or releases what it has claimed meanwhile."""
        if claimed.done():
            claimed.result().release()
            return
        del self._waiters[entry]
        self._drain.update(asyncio.get_running_loop().time(), waiting=bool(self._waiters))
        if entry.returning:
            self._returned.remove(entry)
        else:
            self._order.remove(entry)
        claimed.cancel()
        self.on_wait()

    def _timed_out(self, call: ClientCall, needs: Needs | None = None) -> BatonError:
        if self._placement.usable(call):
            if needs is not None and not self._placement.fits(needs, call):
                message = "no workers that are ready serve a request of this size, or with these fields"
                return BatonError(ErrorKind.UNAVAILABLE, message)
            return BatonError(ErrorKind.OVERLOADED, f"no slot became free within {self.timeout_s:g} s")
        if call.pool is None:
            return BatonError(ErrorKind.UNAVAILABLE, "no pair of prefill and decode workers is ready")
        message = "no workers are left that serve the model on which this request began"
        return BatonError(ErrorKind.UNAVAILABLE, message)
