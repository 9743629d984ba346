"""Error responses of the HTTP API, all with OpenAI's error body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from baton.base.errors import BatonError, ErrorKind
from services.common.errors import error_metadata, http_status, openai_body
from services.common.observability.logs import get_log
from services.router.request.current_call import current_id

_log = get_log("http")


def error_response(
    error: BatonError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """OpenAI's error body, the status of the error's kind unless another one is given, and beside `headers`
    what names the call."""
    sent = {**dict(error_metadata.get()()), **(headers or {})}
    if error.retry_after_s:
        sent["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(openai_body(error), status or http_status(error), sent)


async def _baton_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return error_response(error)


async def _http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors, such as 404 and 405, with OpenAI's body."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        converted = BatonError(ErrorKind.NOT_FOUND, "there is nothing at this path")
    elif error.status_code == 405:
        converted = BatonError(ErrorKind.INVALID, f"{request.method} is not allowed here")
    else:
        converted = BatonError(ErrorKind.INVALID, error.detail)
    return error_response(converted, error.status_code, error.headers)


async def _internal_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(BatonError(ErrorKind.INTERNAL, "the router failed"))


def ended_by(error: Exception) -> BatonError:
    """The error with which an answer ends that has begun."""
    if isinstance(error, BatonError):
        return error
    log_internal_error(error)
    return BatonError(ErrorKind.INTERNAL, "the router failed")


def log_internal_error(error: Exception) -> None:
    """Logs an unexpected exception of a handler by its type: its text may be a part of a prompt."""
    _log.error("http_internal_error", error=type(error).__name__, request=current_id())


HANDLERS: dict[Any, Any] = {
    BatonError: _baton_error,
    HTTPException: _http_exception,
    Exception: _internal_error,
}
