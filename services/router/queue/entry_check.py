"""Refuses requests that enter the queue and would come too late: for their limits, where such requests are
refused (`placement.early_refusal`), else for their client's own deadline (`deadlines`)."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from services.router.placement.early_refusal import Demand, too_late
from services.router.placement.forecast import mean_context, usual_output
from services.router.placement.placement import Cached, Placement
from services.router.queue.deadlines import CAUTION, check_deadline
from services.router.queue.drain_rate import DrainRate
from services.router.queue.entry import QueueEntry
from services.router.queue.passing import may_pass
from services.router.queue.request_order import Ahead, RequestOrder
from services.router.request.slo import Slo
from services.router.workers.backlog import MOST_PROMPTS, Prompt, Queued


class EntryCheck:
    """Judges the requests of one queue, and counts those that it refuses."""

    def __init__(
        self,
        placement: Placement,
        order: RequestOrder,
        drain: DrainRate,
        returned: Callable[[], int],
        siblings: Callable[[], Queued],
        timeout_s: float,
    ) -> None:
        """`order`, `drain`: the queue's. `returned`: how many requests wait that were placed before.
        `siblings`: what waits in the queues of sibling processes. `timeout_s`: the longest that a request
        waits."""
        self._placement = placement
        self._order = order
        self._drain = drain
        self._returned = returned
        self._siblings = siblings
        self._timeout_s = timeout_s
        # Requests that were refused before their time was up, by what it would not have kept.
        self.refused = Counter({"deadline": 0, "limits": 0})

    def too_late_at(self, entry: QueueEntry, tokens: int, max_tokens: int, cached: Cached) -> float:
        """Time from which it is too late to place the request; infinite without limits. Raises BatonError if
        it will be."""
        try:
            if self._placement.refuse_late:
                return self._check_limits(entry, tokens, max_tokens, cached)
            return self._check_deadline(entry, tokens)
        except BatonError as refusal:
            raise self._counted(refusal) from None

    def too_late(self, entry: QueueEntry) -> BatonError:
        """The error of a request that was not placed by then."""
        return self._counted(too_late("no slot became free in time", 1.0, self._refusal_of(entry)))

    def _check_limits(self, entry: QueueEntry, tokens: int, max_tokens: int, cached: Cached) -> float:
        """Checks, where late requests are refused, that the request can meet its limits, by what is
        predicted."""
        if entry.slo is None and entry.first_token_by is None:
            return math.inf
        context, output = mean_context(tokens, max_tokens), usual_output(max_tokens)
        demand = Demand(tokens, context, output, entry.slo or Slo(), self._refusal_of(entry))
        entry.prefill_s = self._placement.check_in_time(
            demand, entry.left_s(), cached, entry.call, self._queued_before(entry)
        )
        if not entry.prefill_s or entry.first_token_by is None:
            return math.inf
        return entry.first_token_by - entry.prefill_s

    def _check_deadline(self, entry: QueueEntry, tokens: int) -> float:
        """Elsewhere: whether the call may have its first token before its deadline at all."""
        left_s = math.inf if entry.deadline is None else entry.deadline - asyncio.get_running_loop().time()
        if entry.deadline is None or left_s > self._timeout_s:
            return math.inf  # the queue's own limit is the stricter one
        slots, own_s = self._placement.least(tokens, entry.call)
        check_deadline(left_s, self._ahead_of(entry), self._drain, slots, own_s)
        return entry.deadline - CAUTION * own_s if own_s else math.inf

    def _queued_before(self, entry: QueueEntry) -> Queued:
        """Returns what waits before a request that comes now; what shorter prompts may pass one by one,
        unless there are many, or it goes before some in any case. Then as large a part of what waits in
        sibling processes goes before it as of what waits here."""
        ahead, siblings = self._ahead_of(entry), self._siblings()
        waiting = len(self._order) + self._returned()
        part = ahead.requests / waiting if waiting else 1.0
        requests = ahead.requests + round(part * siblings.requests)
        one_by_one = part == 1 and len(self._order) <= MOST_PROMPTS
        if not (one_by_one and may_pass(self._placement, self._order)):
            return Queued(requests, ahead.prefill_s + part * siblings.prefill_s)
        prompts = [
            Prompt(one.prefill_s, 0, one.first_token_by or math.inf, one.prefill_s)
            for one in self._order.walk()
        ]
        return Queued(requests, 0.0, [*prompts, *siblings.prompts])

    def _ahead_of(self, entry: QueueEntry) -> Ahead:
        """Predicts what will be placed before the request."""
        ahead = self._order.ahead_of(entry)
        return ahead._replace(requests=ahead.requests + self._returned())

    def _refusal_of(self, entry: QueueEntry) -> ErrorKind:
        """The kind of error with which it is refused early: what ends first, its deadline or its limit."""
        by_limit = self._placement.refuse_late and entry.first_token_by != entry.deadline
        return ErrorKind.RATE_LIMITED if by_limit or entry.deadline is None else ErrorKind.DEADLINE

    def _counted(self, refusal: BatonError) -> BatonError:
        self.refused["deadline" if refusal.kind is ErrorKind.DEADLINE else "limits"] += 1
        return refusal
