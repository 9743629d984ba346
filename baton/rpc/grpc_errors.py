"""The gRPC face of an error, both ways: a status, and the details that say exactly what it is.

A status code is coarser than our kinds, so a `google.rpc.Status` travels in the trailing metadata
`grpc-status-details-bin`, as any gRPC library's users expect it:

    ErrorInfo     reason = the kind's name, domain = "baton", metadata: tokens_sent, code, cause
    BadRequest    the field that a request was refused for
    RetryInfo     where another try may succeed later: when

The call's id and span are beside it as `x-request-id` and `traceresponse`, as they are with an answer.

A peer that is not ours (or died before it could answer) is judged by its code alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton.base.errors import BatonError, ErrorKind, FailureCause, FieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

    Metadata = Iterable[tuple[str, str | bytes]]

_Detail: TypeAlias = error_details_pb2.BadRequest | error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo
_DETAILS = (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID, TRACERESPONSE = "x-request-id", "traceresponse"
# Trailing metadata has a bound of 8 KiB; the message is in it beside the status itself.
_LONGEST_MESSAGE = 1024

CODES: dict[ErrorKind, grpc.StatusCode] = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.QUARANTINED: grpc.StatusCode.ABORTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}

# A status without our details. CANCELLED comes from a server that stops during our call: a
# client that cancels its own call does not read the status.
_KINDS: dict[grpc.StatusCode, ErrorKind] = {
    **{code: kind for kind, code in CODES.items()},
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.CANCELLED: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.OUT_OF_RANGE: ErrorKind.INVALID,
    grpc.StatusCode.ALREADY_EXISTS: ErrorKind.CONFLICT,
}


# gRPC's own words for a message above the limit of either side, which another attempt does not make smaller.
_TOO_LARGE = "message larger than max"
# grpc.aio's own words, with INTERNAL and without details, where a call ended while its client still wrote:
# the failed write hides the server's status (grpc/grpc#36066).
_WRITE_FAILED = "Internal error from Core"


def to_status(error: BatonError) -> grpc.Status:
    """Code, message and trailing metadata with the details."""
    status = status_pb2.Status(code=CODES[error.kind].value[0], message=error.message[:_LONGEST_MESSAGE])
    info = error_details_pb2.ErrorInfo(reason=error.kind.name, domain=DOMAIN)
    info.metadata["tokens_sent"] = str(error.tokens_sent).lower()
    if error.cause is not None:
        info.metadata["cause"] = error.cause.name
    if isinstance(error, FieldError):
        if error.code is not None:
            info.metadata["code"] = error.code
        if error.param is not None:
            refused = error_details_pb2.BadRequest()
            refused.field_violations.add(field=error.param, description=status.message)
            status.details.add().Pack(refused)
    status.details.add().Pack(info)
    if error.retry_after_s:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    answer: grpc.Status = rpc_status.to_status(status)
    return answer


def from_status(code: grpc.StatusCode, message: str | None, metadata: Metadata) -> BatonError:
    """Converts the status of a failed call into an error: a FieldError if its details name a field."""
    text = message or code.name
    kind = _KINDS.get(code, ErrorKind.INTERNAL)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
        kind = ErrorKind.INVALID
    elif code is grpc.StatusCode.INTERNAL and text == _WRITE_FAILED:
        kind = ErrorKind.UNAVAILABLE
    param = own_code = None
    sent, retry_after_s = False, None
    cause: FailureCause | None = None
    metadata = tuple(metadata)
    for detail in _details(metadata):
        if isinstance(detail, error_details_pb2.BadRequest):
            param = next((violation.field for violation in detail.field_violations), None)
        elif isinstance(detail, error_details_pb2.RetryInfo):
            retry_after_s = detail.retry_delay.ToNanoseconds() / 1e9
        elif detail.domain == DOMAIN:
            kind = ErrorKind.__members__.get(detail.reason, kind)
            sent = detail.metadata.get("tokens_sent") == "true"
            own_code = detail.metadata.get("code")
            cause = FailureCause.__members__.get(detail.metadata.get("cause", ""))
    if param is not None or own_code is not None:
        error: BatonError = FieldError(text, param=param, code=own_code, kind=kind)
    else:
        error = BatonError(kind, text)
    error.tokens_sent, error.cause = sent, cause
    texts = {key: value for key, value in metadata if isinstance(value, str)}
    error.request_id, error.traceresponse = texts.get(REQUEST_ID, ""), texts.get(TRACERESPONSE, "")
    if retry_after_s is not None:
        error.retry_after_s = retry_after_s
    return error


def _details(metadata: Metadata) -> list[_Detail]:
    """Parses the details that are known here; a peer's broken ones are none."""
    found: list[_Detail] = []
    try:
        for key, value in metadata:
            if key != DETAILS_KEY or isinstance(value, str):
                continue
            for packed in status_pb2.Status.FromString(value).details:
                for message in (kind() for kind in _DETAILS):
                    if packed.Unpack(message):
                        found.append(message)
    except DecodeError:
        return []
    return found
