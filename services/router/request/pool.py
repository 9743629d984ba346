"""Ids of worker pools, and the binding of a client call to one pool."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.v1.worker_pb2 import DescribeResponse

_ID_HEX_DIGITS = 12


def pool_id(described: DescribeResponse) -> str:
    """The id of a worker's pool: the first 12 hex digits of a digest of everything that defines it."""
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
    """What a binding needs to know of a worker."""

    @property
    def pool(self) -> str: ...

    @property
    def weight_format(self) -> str: ...

    @property
    def decodes(self) -> bool: ...


class Binding:
    """Keeps the attempts of one client call in one pool. Unbound until the first one is placed."""

    def __init__(self) -> None:
        self.pool: str | None = None
        # The weight format of each role that was used (key: whether it decodes).
        self._formats: dict[bool, str] = {}

    def bind(self, *workers: PoolMember) -> None:
        """Records that an attempt is placed on these workers."""
        for worker in workers:
            self.pool = worker.pool
            self._formats[worker.decodes] = worker.weight_format

    def format_of(self, worker: PoolMember) -> str | None:
        """The weight format that a worker of this role must have; None: any."""
        return self._formats.get(worker.decodes)
