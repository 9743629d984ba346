"""The two faces of an error, each stated once: a gRPC status and OpenAI's HTTP error body.

A gRPC status code is coarser than our kinds, so the exact kind travels beside it as trailing
metadata, and a peer that is not ours (or died before it could answer) is judged by code alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio

from baton.errors import BatonError, ErrorKind

if TYPE_CHECKING:
    from collections.abc import Iterable

KIND_METADATA = "baton-error-kind"


class FieldError(BatonError):
    """A request refused because of one of its fields.

    `param` is the field's name on the door it came by, `code` OpenAI's machine-readable word.
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


_GRPC_CODE: dict[ErrorKind, grpc.StatusCode] = {
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

# A status without our metadata. CANCELLED comes from a server that stops under our call: whoever
# cancels a call of its own never asks what it answered.
_KIND_OF_CODE: dict[grpc.StatusCode, ErrorKind] = {
    **{code: kind for kind, code in _GRPC_CODE.items()},
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.CANCELLED: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.OUT_OF_RANGE: ErrorKind.INVALID,
    grpc.StatusCode.ALREADY_EXISTS: ErrorKind.CONFLICT,
}


@dataclass(frozen=True)
class HttpFace:
    """How OpenAI's API spells a kind: the status, and the body's `type` and default `code`."""

    status: int
    type: str
    code: str | None = None


_HTTP: dict[ErrorKind, HttpFace] = {
    ErrorKind.INVALID: HttpFace(400, "invalid_request_error"),
    ErrorKind.UNAUTHENTICATED: HttpFace(401, "authentication_error", "invalid_api_key"),
    ErrorKind.FORBIDDEN: HttpFace(403, "permission_error"),
    ErrorKind.NOT_FOUND: HttpFace(404, "invalid_request_error", "not_found"),
    ErrorKind.CONFLICT: HttpFace(409, "conflict_error"),
    ErrorKind.RATE_LIMITED: HttpFace(429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: HttpFace(503, "overloaded_error", "overloaded"),
    ErrorKind.DEADLINE: HttpFace(504, "timeout_error", "timeout"),
    ErrorKind.QUARANTINED: HttpFace(503, "server_error", "quarantined"),
    ErrorKind.UNAVAILABLE: HttpFace(503, "server_error", "unavailable"),
    ErrorKind.INTERNAL: HttpFace(500, "server_error", "internal_error"),
}


def grpc_code(kind: ErrorKind) -> grpc.StatusCode:
    """The status code a peer sees for this kind."""
    return _GRPC_CODE[kind]


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends a call with the error's status; never returns."""
    metadata = ((KIND_METADATA, error.kind.name.lower()),)
    await context.abort(grpc_code(error.kind), error.message, trailing_metadata=metadata)
    raise AssertionError("abort returned")


def from_grpc(error: grpc.RpcError, peer: str) -> BatonError:
    """What a failed call to `peer` means here."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return BatonError(ErrorKind.INTERNAL, f"{peer}: {error}")
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    named = _named_kind(metadata)
    kind = named or _KIND_OF_CODE.get(error.code(), ErrorKind.INTERNAL)
    return BatonError(kind, f"{peer}: {error.details() or error.code().name}")


def _named_kind(metadata: Iterable[tuple[str, str | bytes]]) -> ErrorKind | None:
    for key, value in metadata:
        if key == KIND_METADATA and isinstance(value, str):
            return ErrorKind.__members__.get(value.upper())
    return None


def http_status(error: BatonError) -> int:
    """The HTTP status of this error."""
    return _HTTP[error.kind].status


def openai_body(error: BatonError) -> dict[str, dict[str, str | None]]:
    """OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`."""
    face = _HTTP[error.kind]
    param, code = (error.param, error.code) if isinstance(error, FieldError) else (None, None)
    return {"error": {"message": error.message, "type": face.type, "param": param, "code": code or face.code}}
