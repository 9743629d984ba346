"""Workers as a router knows them, without any process behind them."""

from __future__ import annotations

from typing import cast

from baton.v1.types_pb2 import WorkerIdentity, WorkerRole
from baton.v1.worker_pb2 import DescribeResponse, Load, Pool, WorkerLimits
from services.router.placement.placement import Placement
from services.router.placement.pools import Pools
from services.router.workers.directory import Directory
from services.router.workers.peer import Peer
from services.router.workers.worker import Worker

MODEL, TOKENIZER = "fake", b"t"


def bare_worker(
    name: str,
    *,
    checkpoint: bytes = b"c",
    tokenizer: bytes = TOKENIZER,
    fingerprint: bytes = b"same",
    weight_format: str = "bfloat16",
    kv_format: str = "k",
    slots: int = 8,
    context: int = 1 << 20,
    vocab_size: int = 300,
    receives_handoffs: bool = False,
    limits: WorkerLimits | None = None,
) -> Worker:
    """A live worker, of the role that its name begins with."""
    described = DescribeResponse(
        identity=WorkerIdentity(
            name=name,
            incarnation=bytes(16),
            role=WorkerRole.Value(f"WORKER_ROLE_{name.split('-')[0].upper()}"),
        ),
        fingerprint=fingerprint,
        max_context_tokens=context,
        vocab_size=vocab_size,
        load=Load(slots=slots, free_slots=slots),
        pool=Pool(
            model=MODEL, checkpoint=checkpoint, tokenizer=tokenizer, kv_format=kv_format, numerics="exact"
        ),
        weight_format=weight_format,
        receives_handoffs=receives_handoffs,
        limits=limits,
    )
    worker = Worker(cast("Peer", None), described, lambda: None)
    worker.following = True
    return worker


def workers_of(*names: str) -> list[Worker]:
    return [bare_worker(name) for name in names]


class Found(Directory):
    """The workers of a test."""

    def __init__(self, workers: list[Worker]) -> None:
        self.found = workers

    @property
    def workers(self) -> list[Worker]:
        return self.found


def pools_of(workers: list[Worker], configured: str | None = None) -> Pools:
    """Reviewed once; later changes of the list are seen."""
    pools = Pools(MODEL, TOKENIZER, configured, lambda: workers)
    pools.review()
    return pools


def placement_of(workers: list[Worker], ahead: int = 1000) -> Placement:
    return Placement(Found(workers), pools_of(workers), prefill_ahead_tokens=ahead)
