"""The limits that the router announces and checks requests against: those of each pair of live workers.

A request is refused at once where it fits none of these pairs. Where a pair ends, its limits are kept for as
long as a request may wait in the queue: it may come back, and clients have read them.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from services.router.request.limits import PairLimits, WorkerLimits
from services.router.workers.worker import Worker


class Announced:
    """The limits of the pairs among some workers. Call `review` after each change of any of them."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers`: returns those that new requests may use. `keep_s`: how long the limits of a pair stay
        once it has ended."""
        self._workers = workers
        self._keep_s = keep_s
        self._clock = clock
        # Until when each pair's limits are announced; infinite while it lives.
        self._until: dict[PairLimits, float] = {}
        self._seen: list[tuple[Worker, bool, int]] = []

    def review(self) -> None:
        """Takes the pairs that live now."""
        workers = self._workers()
        seen = [(worker, worker.alive, worker.links.changes) for worker in workers]
        if seen == self._seen:
            return  # only their load has changed
        self._seen = seen
        now, live = self._clock(), _limits_of(workers)
        for pair, until in list(self._until.items()):
            if pair not in live and until == math.inf:
                self._until[pair] = now + self._keep_s
            elif until <= now:
                del self._until[pair]
        self._until.update(dict.fromkeys(live, math.inf))

    @property
    def pairs(self) -> tuple[PairLimits, ...]:
        """The limits that requests are checked against; none where there is no pair of workers."""
        now = self._clock()
        return tuple(pair for pair, until in self._until.items() if until > now)

    @property
    def max_context_tokens(self) -> int | None:
        """Tokens of the largest request that some pair serves, however they are divided between prompt and
        output; None where there is no pair."""
        return max((pair.context for pair in self.pairs), default=None)


def _limits_of(workers: Sequence[Worker]) -> set[PairLimits]:
    """The limits of the pairs of live workers among these; few workers differ in theirs."""
    prefills: dict[WorkerLimits, list[Worker]] = defaultdict(list)
    decodes: dict[WorkerLimits, list[Worker]] = defaultdict(list)
    for worker in workers:
        if worker.alive and worker.prefills:
            prefills[worker.limits].append(worker)
        if worker.alive and worker.decodes:
            decodes[worker.limits].append(worker)
    return {
        PairLimits.of(prefill, decode)
        for prefill, computing in prefills.items()
        for decode, decoding in decodes.items()
        if any(one.can_prefill_for(other) for one in computing for other in decoding)
    }
