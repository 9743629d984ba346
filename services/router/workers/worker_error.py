"""Errors of workers and of the router, each with a text for logs and one for clients.

Clients do not get names, addresses or incarnations of workers.
"""

from __future__ import annotations

import grpc

from baton.base.errors import BatonError, ErrorKind, FailureCause
from services.common.errors import from_grpc, logged_reason
from services.common.observability.logs import get_log

_log = get_log("dispatch")

# Kinds of errors after which another attempt may succeed.
RETRIED_KINDS = frozenset(
    {
        ErrorKind.UNAVAILABLE,
        ErrorKind.OVERLOADED,
        ErrorKind.DEADLINE,
        ErrorKind.CONFLICT,
        ErrorKind.QUARANTINED,
    }
)

# A worker's refusal of the router's call is not the client's error: another worker may accept the request.
_CLIENT_KINDS: dict[ErrorKind, ErrorKind] = {
    ErrorKind.NOT_FOUND: ErrorKind.UNAVAILABLE,
    ErrorKind.UNAUTHENTICATED: ErrorKind.UNAVAILABLE,
    ErrorKind.FORBIDDEN: ErrorKind.UNAVAILABLE,
    ErrorKind.RATE_LIMITED: ErrorKind.OVERLOADED,
}

_PUBLIC: dict[ErrorKind, str] = {
    ErrorKind.UNAVAILABLE: "a worker became unavailable",
    ErrorKind.OVERLOADED: "the workers have no room",
    ErrorKind.DEADLINE: "a worker did not answer in time",
    ErrorKind.CONFLICT: "a worker gave up the request",
    ErrorKind.QUARANTINED: "a worker is quarantined",
    ErrorKind.INTERNAL: "a worker failed",
}


class WorkerError(BatonError):
    """An error of one worker. `message` names it; `logged` does too and is for logs, `public` for clients."""

    def __init__(self, kind: ErrorKind, worker: str, reason: str, cause: FailureCause | None = None) -> None:
        kind = _CLIENT_KINDS.get(kind, kind)
        super().__init__(kind, f"{worker}: {reason}", cause=cause)
        self.logged = f"{worker}: {logged_reason(BatonError(kind, reason))}"
        # The reason of INVALID is about the request and names no worker.
        self.public = _PUBLIC.get(kind, reason)
        self._worker, self._reason = worker, reason

    def of_worker(self) -> WorkerError:
        """The error where it says nothing of the request: the worker alone refused it."""
        return WorkerError(ErrorKind.CONFLICT, self._worker, self._reason, self.cause)


def from_rpc_error(error: grpc.RpcError, worker: str) -> WorkerError:
    """Converts the error of a call to a worker."""
    known = from_grpc(error, "")
    return WorkerError(known.kind, worker, known.message.removeprefix(": "), known.cause)


def internal_error(request_id: bytes, error: Exception) -> BatonError:
    """Logs an unexpected exception of the router; returns the error for the client."""
    _log.error("request_internal_error", request=request_id.hex(), exc_info=error)
    return BatonError(ErrorKind.INTERNAL, f"the router failed: {type(error).__name__}")


def client_error(error: BatonError) -> BatonError:
    """The error to send to the client."""
    if isinstance(error, WorkerError):
        return BatonError(error.kind, error.public, tokens_sent=error.tokens_sent)
    return error
