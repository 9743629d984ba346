"""The state of a worker as metrics and status report it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.v1.admin_pb2 import WorkerState

if TYPE_CHECKING:
    from services.router.workers.worker import Worker


def state_of(worker: Worker | None) -> WorkerState.ValueType:
    """The state of the worker at an address; None: no worker has answered there yet."""
    if worker is None:
        return WorkerState.WORKER_STATE_STARTING
    if worker.lost:
        return WorkerState.WORKER_STATE_LOST
    if worker.draining:
        return WorkerState.WORKER_STATE_DRAINING
    if worker.alive and not worker.serves:
        return WorkerState.WORKER_STATE_OTHER_POOL
    return WorkerState.WORKER_STATE_READY if worker.alive else WorkerState.WORKER_STATE_SILENT
