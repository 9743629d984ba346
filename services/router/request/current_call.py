"""The call that is being served, and what its errors name it by.

Both APIs set it before anything else sees the call. A context variable hands it on: it holds for the task
that serves the call and for those that this task starts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from baton.rpc.grpc_errors import REQUEST_ID, TRACERESPONSE
from services.common.errors import error_metadata
from services.router.request.call_trace import CallTrace

_ID_BYTES = 16


def random_id() -> bytes:
    """The id of an output."""
    return secrets.token_bytes(_ID_BYTES)


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The call of the current task. `trace`: None where traces are off. `id`: that of the call's first
    output."""

    trace: CallTrace | None = None
    id: bytes = field(default_factory=random_id)

    def error_metadata(self) -> Sequence[tuple[str, str]]:
        """The metadata of each of the call's errors, as HTTP headers or trailing metadata."""
        named = [(REQUEST_ID, self.id.hex())]
        if self.trace is not None:
            named.append((TRACERESPONSE, self.trace.header_of_ended))
        return named


current_call: ContextVar[CurrentCall | None] = ContextVar("current_call", default=None)


def begin_call(trace: CallTrace | None) -> None:
    """Begins the call that the current task serves."""
    call = CurrentCall(trace)
    current_call.set(call)
    error_metadata.set(call.error_metadata)


def current_id() -> str:
    """The id of the call that is being served, for logs; empty where there is none."""
    call = current_call.get()
    return "" if call is None else call.id.hex()
