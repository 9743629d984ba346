"""True if some pair of workers could serve a request: what readiness is, of a router and of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def unusable_reason(workers: Sequence[Worker]) -> str:
    """Why none could, without names or addresses. `workers`: all that are not lost."""
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
