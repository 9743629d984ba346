"""The key of an attempt in the tables of a worker's two processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from baton.v1.types_pb2 import Attempt


class AttemptKey(NamedTuple):
    """One attempt at one request."""

    request_id: bytes
    number: int

    @classmethod
    def of(cls, attempt: Attempt) -> AttemptKey:
        """The key of the wire's message."""
        return cls(attempt.request_id, attempt.number)
