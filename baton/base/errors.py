"""The errors that Baton reports to its users and peers, and which of them may be retried.

    BatonError(kind, message)
        kind.retryable      another attempt, elsewhere or later, may succeed

`baton/rpc/grpc_errors.py` maps a kind to a gRPC status, `services/common/errors.py` to OpenAI's error body.
"""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """One word for each way a request can fail; the values are those of `baton.v1.ErrorKind`."""

    INVALID = 1
    UNAUTHENTICATED = 2
    FORBIDDEN = 3
    NOT_FOUND = 4
    CONFLICT = 5
    RATE_LIMITED = 6
    OVERLOADED = 7
    DEADLINE = 8
    QUARANTINED = 9
    UNAVAILABLE = 10
    INTERNAL = 11

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed at another worker or a little later."""
        return self in _RETRYABLE


_RETRYABLE = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE})


class FailureCause(Enum):
    """The part of the cluster that a failure came from, where that decides what is done next, or is counted;
    the values are those of `baton.v1.FailureCause`."""

    LINK = 1
    BLOCKS = 2
    EXCHANGE = 3


class BatonError(Exception):
    """A failure with a kind, reported to the caller. The message never contains prompt or output.

    `retry_after_s`: when another try may succeed, as a hint to the caller; 0 where no time is better. Unset:
    1 s for a retryable kind. `cause`: known between Baton's own processes alone. For a failed call to a
    router: `request_id`, its id in the router's log; `traceresponse`, its span as W3C Trace Context writes
    it, empty where traces are off. A router's own errors have neither.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        tokens_sent: bool = False,
        retry_after_s: float | None = None,
        cause: FailureCause | None = None,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.kind = kind
        self.message = message
        self.tokens_sent = tokens_sent
        self.retry_after_s = float(kind.retryable) if retry_after_s is None else retry_after_s
        self.request_id = self.traceresponse = ""


class FieldError(BatonError):
    """A request refused because of one of its fields.

    `param` is the field's name in the API that was called, `code` a machine-readable word such as OpenAI's.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: ErrorKind = ErrorKind.INVALID,
    ) -> None:
        super().__init__(kind, message)
        self.param = param
        self.code = code


class NameTakenError(BatonError):
    """Another worker that lives has this one's name. `kept`: it had taken it from a worker that lived, and
    keeps it from every further start; else it is the newer of the two."""

    def __init__(self, name: str, host: str, address: str, *, kept: bool) -> None:
        """`host`, `address`: where the other one is."""
        how = f"{name} is taken: it is" if kept else f"a newer {name} has registered: it is"
        super().__init__(
            ErrorKind.CONFLICT, f"{how} on {host or 'an unnamed host'} at {address or 'no address'}"
        )
        self.name, self.host, self.address, self.kept = name, host, address, kept
