"""By what the two servicers find an attempt. The engine's side has
`services.worker.engine.decode.ticket_book.AttemptKey`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.v1.types_pb2 import Attempt

Key = tuple[bytes, int]
"""(request id, attempt number)."""


def key_of(attempt: Attempt) -> Key:
    return attempt.request_id, attempt.number
