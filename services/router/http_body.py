"""Reading a request's body, and ending its answer when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from baton.errors import FieldError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

MAX_BODY_BYTES = 16 * 1024 * 1024


class Cancelling:
    """Runs a handler that ends with its client: the body is read first, then only a disconnect can come.

    The handler runs as a task beside a watch of the connection; when the client goes away the task is
    cancelled, and with it every request of the answer. That is no fault, and nobody is told.
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


def read_json(request: HttpRequest) -> object:
    """The body that `Cancelling` read; FieldError where it is no JSON."""
    try:
        document: object = json.loads(request.state.body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {type(error).__name__}") from None
    return document


def _no_constant(name: str) -> float:
    """NaN and Infinity are no JSON, whatever Python's reader thinks."""
    raise ValueError(name)
