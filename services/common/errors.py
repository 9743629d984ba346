"""The representations of an error at the APIs: a gRPC status with details, and OpenAI's HTTP error body."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.rpc.grpc_errors import from_status, to_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True)
class HttpError:
    """An error kind in OpenAI's API: the status, and the body's `type` and default `code`."""

    status: int
    type: str
    code: str | None = None


_HTTP: dict[ErrorKind, HttpError] = {
    ErrorKind.INVALID: HttpError(400, "invalid_request_error"),
    ErrorKind.UNAUTHENTICATED: HttpError(401, "authentication_error", "invalid_api_key"),
    ErrorKind.FORBIDDEN: HttpError(403, "permission_error"),
    ErrorKind.NOT_FOUND: HttpError(404, "invalid_request_error", "not_found"),
    ErrorKind.CONFLICT: HttpError(409, "conflict_error"),
    ErrorKind.RATE_LIMITED: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: HttpError(503, "overloaded_error", "overloaded"),
    ErrorKind.DEADLINE: HttpError(504, "timeout_error", "timeout"),
    ErrorKind.QUARANTINED: HttpError(503, "server_error", "quarantined"),
    ErrorKind.UNAVAILABLE: HttpError(503, "server_error", "unavailable"),
    ErrorKind.INTERNAL: HttpError(500, "server_error", "internal_error"),
}


# What each error of the call that is being served has beside it, as HTTP headers or trailing metadata.
error_metadata: ContextVar[Callable[[], Sequence[tuple[str, str]]]] = ContextVar(
    "error_metadata", default=tuple
)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends a call with the error's status and the call's `error_metadata`; never returns."""
    status, named = to_status(error), error_metadata.get()()
    await context.abort(status.code, status.details, trailing_metadata=(*status.trailing_metadata, *named))
    raise AssertionError("abort returned")


def from_grpc(error: grpc.RpcError, peer: str) -> BatonError:
    """A failed call to `peer` as an error. Never a FieldError: the field would be one of this process's
    call."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return BatonError(ErrorKind.INTERNAL, f"{peer}: {error}")
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    meant = from_status(error.code(), error.details(), metadata)
    return BatonError(meant.kind, f"{peer}: {meant.message}", cause=meant.cause)


def logged_reason(error: BatonError) -> str:
    """An error's message as logs may have it: that of an invalid request may repeat a part of it, such as of
    its grammar, and is for the client alone."""
    return "its client has the reason" if error.kind is ErrorKind.INVALID else error.message


def http_status(error: BatonError) -> int:
    """The HTTP status of this error."""
    return _HTTP[error.kind].status


def openai_body(error: BatonError) -> dict[str, dict[str, str | None]]:
    """OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`."""
    http = _HTTP[error.kind]
    param, code = (error.param, error.code) if isinstance(error, FieldError) else (None, None)
    return {"error": {"message": error.message, "type": http.type, "param": param, "code": code or http.code}}
