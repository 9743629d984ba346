"""Which pool of workers answers a request: a pool's id, and the pool that a client call is bound to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.v1.worker_pb2 import DescribeResponse

_ID_HEX_DIGITS = 12


def pool_id(described: DescribeResponse) -> str:
    """The name of a worker's pool: a digest of all its parts, 12 hex digits."""
    pool = described.pool
    digest = hashlib.sha256()
    for part in (
        pool.model.encode(),
        pool.checkpoint,
        pool.tokenizer,
        pool.kv_format.encode(),
        pool.numerics.encode(),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:_ID_HEX_DIGITS]


class PoolMember(Protocol):
    """A worker, as far as a binding looks at it."""

    @property
    def pool(self) -> str: ...

    @property
    def weight_format(self) -> str: ...

    @property
    def decodes(self) -> bool: ...


class Binding:
    """The pool that the attempts of one client call stay in; empty until the first of them is placed."""

    def __init__(self) -> None:
        self.pool: str | None = None
        # Of each role that was used, what its weights are kept as.
        self._formats: dict[bool, str] = {}

    def bind(self, *workers: PoolMember) -> None:
        """An attempt is placed on these workers."""
        for worker in workers:
            self.pool = worker.pool
            self._formats[worker.decodes] = worker.weight_format

    def format_of(self, worker: PoolMember) -> str | None:
        """The weight format that a worker of this role must have; None where any will do."""
        return self._formats.get(worker.decodes)
