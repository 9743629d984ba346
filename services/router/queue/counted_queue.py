"""A waiting queue that counts what is asked of it."""

from __future__ import annotations

from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.placement import Cached, Placement
from services.router.queue.demand import Demand
from services.router.queue.entry import QueueEntry
from services.router.queue.waiting_queue import WaitingQueue


class CountedQueue(WaitingQueue):
    """Counts each request once, when it asks for workers for the first time."""

    def __init__(
        self, placement: Placement, max_waiting: int, timeout_s: float, share: float, demand: Demand
    ) -> None:
        super().__init__(placement, max_waiting, timeout_s, share)
        self.demand = demand

    async def claim(
        self, entry: QueueEntry, tokens: int, max_tokens: int, until: float, cached: Cached
    ) -> Claim:
        """Claims like `WaitingQueue.claim`, and counts the request's demand."""
        if entry.returning:
            return await super().claim(entry, tokens, max_tokens, until, cached)
        with self.demand.asked(tokens) as asked:
            claim = await super().claim(entry, tokens, max_tokens, until, cached)
            asked.placed(claim.prefill, cached(claim.prefill))
            return claim

    async def claim_prefill(self, entry: QueueEntry, tokens: int, until: float) -> PrefillClaim:
        """Claims like `WaitingQueue.claim_prefill`, and counts the request's demand."""
        if entry.returning:
            return await super().claim_prefill(entry, tokens, until)
        with self.demand.asked(tokens) as asked:
            claim = await super().claim_prefill(entry, tokens, until)
            asked.placed(claim.prefill)
            return claim
