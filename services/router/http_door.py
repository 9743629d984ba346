"""The HTTP door: OpenAI's completions and models, and a health check.

An answer runs as a task beside a watch of the connection: when the client goes away the task is
cancelled, and with it every request of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import BatonError, ErrorKind
from services.common.errors import FieldError, http_status, openai_body
from services.common.logs import get_log
from services.router.completion import Completion
from services.router.openai_api import parse_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from services.router.service import Service

MAX_BODY_BYTES = 16 * 1024 * 1024
_RETRY_AFTER_S = "1"

_log = get_log("http")


class HttpDoor:
    """The ASGI application."""

    def __init__(self, service: Service, more_routes: Sequence[BaseRoute] = ()) -> None:
        self._service = service
        self._created = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/completions", _Cancelling(self.completions), methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                *more_routes,
            ],
            exception_handlers={
                BatonError: _baton_error,
                HTTPException: _http_exception,
                Exception: _fault,
            },
        )

    async def completions(self, request: HttpRequest, send: Send) -> None:
        """POST /v1/completions."""
        body = parse_completion(await _json(request))
        admitted = [await self._service.admit(asked) for asked in body.asked()]
        completion = Completion(self._service, body, admitted, f"cmpl-{secrets.token_hex(16)}")
        if body.stream:
            await completion.stream(send)
        else:
            await JSONResponse(await completion.whole())(request.scope, request.receive, send)

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model}."""
        if request.path_params["model"] != self._service.intake.served_name:
            message = "the model does not exist"
            raise FieldError(message, param="model", code="model_not_found", kind=ErrorKind.NOT_FOUND)
        return JSONResponse(self._model())

    async def health(self, request: HttpRequest) -> Response:
        """GET /health: 200 where a request would be served, else 503."""
        usable = self._service.usable()
        return JSONResponse({"status": "ok" if usable else "unavailable"}, 200 if usable else 503)

    def _model(self) -> dict[str, object]:
        intake = self._service.intake
        return {
            "id": intake.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": intake.max_context_tokens,
        }


class _Cancelling:
    """Runs a handler that ends with its client: the body is read first, then only a disconnect can come.

    A class, since Starlette takes a class instance for the ASGI application that it is.
    """

    def __init__(self, handler: Callable[[HttpRequest, Send], Awaitable[None]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        with contextlib.suppress(ClientDisconnect):
            await _read_body(request)
            answer = asyncio.ensure_future(self._handler(request, send))
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (answer, gone):
                    task.cancel()
                await asyncio.wait((answer, gone))
            if not answer.cancelled():
                answer.result()


async def _read_body(request: HttpRequest) -> None:
    """Reads and keeps the body, refusing one that is too large while it comes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise FieldError(f"the body has more than {MAX_BODY_BYTES} bytes")
    request.state.body = bytes(body)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _json(request: HttpRequest) -> object:
    try:
        document: object = json.loads(request.state.body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {type(error).__name__}") from None
    return document


def _no_constant(name: str) -> float:
    """NaN and Infinity are no JSON, whatever Python's reader thinks."""
    raise ValueError(name)


def error_response(error: BatonError) -> Response:
    """OpenAI's error body with its status."""
    status = http_status(error)
    headers = {"retry-after": _RETRY_AFTER_S} if error.kind.retryable else None
    return JSONResponse(openai_body(error), status, headers)


async def _baton_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return error_response(error)


async def _http_exception(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    kind = ErrorKind.NOT_FOUND if error.status_code == 404 else ErrorKind.INVALID
    return JSONResponse(openai_body(BatonError(kind, error.detail)), error.status_code, error.headers)


async def _fault(request: HttpRequest, error: Exception) -> Response:
    _log.error("http_fault", error=type(error).__name__)
    return error_response(BatonError(ErrorKind.INTERNAL, "the router failed"))
