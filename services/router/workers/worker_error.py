"""What went wrong at a worker or in the router, in two texts: one for logs, and one for clients.

Clients are not told names, addresses or incarnations of workers: they cannot use them, and others could.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from services.common.errors import from_grpc
from services.common.observability.logs import get_log

if TYPE_CHECKING:
    import grpc

_log = get_log("dispatch")

# Failures that another attempt may not meet again.
WORTH_ANOTHER = frozenset(
    {
        ErrorKind.UNAVAILABLE,
        ErrorKind.OVERLOADED,
        ErrorKind.DEADLINE,
        ErrorKind.CONFLICT,
        ErrorKind.QUARANTINED,
    }
)

# How a worker refuses a router is no answer to the client: it may have been right to ask another worker.
_MEANT: dict[ErrorKind, ErrorKind] = {
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
    """A failure of one worker. `message` names it, for logs; `public` is what a client may read."""

    def __init__(self, kind: ErrorKind, worker: str, reason: str) -> None:
        kind = _MEANT.get(kind, kind)
        super().__init__(kind, f"{worker}: {reason}")
        # What a worker calls invalid is the request, of which the reason tells; it names no worker.
        self.public = _PUBLIC.get(kind, reason)


def failed_call(error: grpc.RpcError, worker: str) -> WorkerError:
    """What a failed call to a worker means."""
    meant = from_grpc(error, "")
    return WorkerError(meant.kind, worker, meant.message.removeprefix(": "))


def public_text(error: BatonError) -> str:
    """What a client may read of an error."""
    return error.public if isinstance(error, WorkerError) else error.message


def router_fault(request_id: bytes, error: Exception) -> BatonError:
    """Logs an exception that is a defect of the router; what its client is told of it."""
    _log.error("life_failed", request=request_id.hex(), exc_info=error)
    return BatonError(ErrorKind.INTERNAL, f"the router failed: {type(error).__name__}")


def for_client(error: BatonError) -> BatonError:
    """An error as a client is given it."""
    if isinstance(error, WorkerError):
        return BatonError(error.kind, error.public, tokens_sent=error.tokens_sent)
    return error
