"""Reads request bodies, and cancels handlers when their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from baton.base.errors import FieldError
from services.router.http.errors import error_response

_LINGER_S = 1.0
# The longest Content-Length that is parsed.
_MAX_DIGITS = 18


class CancelOnDisconnect:
    """Runs a handler once the body is read, and cancels it when the client disconnects.

    A cancelled handler is not an error and is not logged. This is a class, because Starlette takes a function
    for a handler of its own kind, and any other callable for an ASGI application.
    """

    def __init__(self, handler: Callable[[HttpRequest, Send], Awaitable[None]], max_body_bytes: int) -> None:
        """`handler` finds the body in `request.state.body`. Bodies that are too large are answered with
        413."""
        self._handler = handler
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        with contextlib.suppress(ClientDisconnect):
            if not await self._read_body(request):
                await _refuse(self._max_body_bytes, receive, send)
                return
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

    async def _read_body(self, request: HttpRequest) -> bool:
        """Reads the body; False as soon as it is known to be too large."""
        declared = request.headers.get("content-length", "0")
        if len(declared) > _MAX_DIGITS or int(declared) > self._max_body_bytes:
            return False
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                return False
        request.state.body = body
        return True


async def _refuse(max_body_bytes: int, receive: Receive, send: Send) -> None:
    """Responds with 413 and ends the connection. Continues to read briefly, because a reset would destroy the
    response on its way to a client that still sends."""
    error = FieldError(f"the body has more than {max_body_bytes} bytes", code="body_too_large")
    response = error_response(error, 413, {"connection": "close"})
    await send({"type": "http.response.start", "status": 413, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
    await send({"type": "http.response.body"})


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
