"""How a worker stands with this router, in one word for metrics and status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.v1.router_pb2 import WorkerState

if TYPE_CHECKING:
    from services.router.worker import Worker


def state_of(worker: Worker | None) -> WorkerState.ValueType:
    """None: nobody has been found at its address."""
    if worker is None:
        return WorkerState.WORKER_STATE_STARTING
    if worker.lost:
        return WorkerState.WORKER_STATE_LOST
    if worker.described.draining:
        return WorkerState.WORKER_STATE_DRAINING
    return WorkerState.WORKER_STATE_READY if worker.alive else WorkerState.WORKER_STATE_SILENT
