"""The message that an engine process reads from standard input at its start. Torch-free."""

from __future__ import annotations

from baton.v1.types_pb2 import WorkerIdentity, WorkerRole
from services.common.config.types import StrictModel
from services.common.config.worker import WorkerConfig


class EngineLaunch(StrictModel):
    """Configuration, identity, and the file descriptors that the engine inherits."""

    worker: WorkerConfig
    incarnation: str  # 32 hex digits, shared by front and engine
    started_ns: int  # the front's start, by the wall clock
    channel_fd: int
    memory_fd: int
    masks_fd: int | None = None  # of the mask board; None: no output is guided
    stepped_fd: int | None = None  # of the eventfd that is set when decode steps have ended


def identity_of(config: WorkerConfig, incarnation: bytes, started_ns: int) -> WorkerIdentity:
    """The identity of this start of a worker, the same in front and engine."""
    return WorkerIdentity(
        name=config.name,
        incarnation=incarnation,
        role=WorkerRole.Value(f"WORKER_ROLE_{config.role.upper()}"),
        rank=0,
        rank_count=1,
        cluster_id=config.cluster_id,
        started_ns=started_ns,
    )
