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
    """The limits of the pairs among some workers. Call `review` whenever a worker is found, lost, or alive
    again, and after each change of a link."""

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
        # `pairs`, and until when they stay as they are if no worker changes.
        self._pairs: tuple[PairLimits, ...] = ()
        self._pairs_until = math.inf

    def review(self) -> None:
        """Takes the pairs that live now."""
        now, live = self._clock(), _limits_of(self._workers())
        for pair, until in self._until.items():
            if pair not in live and until == math.inf:
                self._until[pair] = now + self._keep_s
        self._until.update(dict.fromkeys(live, math.inf))
        self._drop_ended(now)

    @property
    def pairs(self) -> tuple[PairLimits, ...]:
        """The limits that requests are checked against; none where there is no pair of workers. The same
        object until they change."""
        if (now := self._clock()) >= self._pairs_until:
            self._drop_ended(now)
        return self._pairs

    def _drop_ended(self, now: float) -> None:
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        self._pairs = tuple(self._until)
        self._pairs_until = min(self._until.values(), default=math.inf)


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
