"""Judges whether some pair of workers could serve a request: what readiness is, of a router and of a pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from services.router.workers.worker import Worker


def some_pair(workers: Iterable[Worker]) -> bool:
    """True if a pair of these could serve a request, now or once it has room: both are alive, have a common
    transport, and their link has not failed just now."""
    members = list(workers)
    return any(
        worker.can_prefill_for(decode)
        for decode in members
        if decode.decodes and decode.alive
        for worker in members
    )


class LastingPair:
    """Readiness of a router by its workers: some pair could serve a request, or could within the last
    `hold_s` seconds, for which a request that comes now would wait for another one (`queue_timeout_s`). So a
    router whose last worker is replaced keeps its place behind a load balancer. Before its first pair it is
    not ready."""

    def __init__(self, some_pair: Callable[[], bool], hold_s: float, clock: Callable[[], float]) -> None:
        """`some_pair`: returns True if there is one now. `clock`: returns seconds."""
        self._some_pair = some_pair
        self._hold_s = hold_s
        self._clock = clock
        # When it ends to be ready; infinite while there is a pair.
        self._until = -math.inf

    def ready(self) -> bool:
        """True if a request that comes now is served, or waits for a pair that may come back."""
        if self._some_pair():
            self._until = math.inf
        elif self._until == math.inf:
            self._until = self._clock() + self._hold_s
        return self._until > self._clock()

    @property
    def ends_in_s(self) -> float | None:
        """Seconds until it is not ready any more if no pair comes; None where no end is due."""
        left_s = self._until - self._clock()
        return left_s if 0 < left_s < math.inf else None


def unusable_reason(workers: Sequence[Worker]) -> str:
    """Says why no pair of `workers` could serve a request, without names or addresses. `workers`: all that
    are not lost."""
    alive = [worker for worker in workers if worker.alive]
    if not alive:
        return "no worker is ready"
    members = [worker for worker in alive if worker.serves]
    if not members:
        return "no worker that is ready belongs to the model's pool"
    decodes = [worker for worker in members if worker.decodes]
    if not decodes:
        return "no decode worker is ready"
    prefills = [worker for worker in members if worker.prefills_for_others]
    if not prefills:
        return "no prefill worker is ready"
    matching = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if decode.receives_handoffs and prefill.described.fingerprint == decode.described.fingerprint
    ]
    if not matching:
        return _no_match(prefills, decodes)
    if not any(prefill.reaches(decode) for prefill, decode in matching):
        return "no prefill worker has a transport in common with a decode worker"
    return "the links between prefill and decode workers have failed"


def _no_match(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> str:
    reason = "no prefill worker matches a decode worker"
    of_prefill, of_decode = (
        {worker.described.pool.kv_format for worker in workers} for workers in (prefills, decodes)
    )
    if of_prefill.isdisjoint(of_decode):
        reason += f": their KV formats are {', '.join(sorted(of_prefill))} and {', '.join(sorted(of_decode))}"
    return reason
