"""Assigns each HTTP request its id and span, which its answer names, also if it is refused; logs those whose
handler failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.http.errors import log_internal_error
from services.router.request.call_trace import CallTrace
from services.router.request.current_call import begin_call


class NamedCalls:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp, trace_of: Callable[[Mapping[str, str]], CallTrace | None]) -> None:
        """`trace_of`: the trace of a call with these headers; None where traces are off."""
        self._app = app
        self._trace_of = trace_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_call(self._trace_of(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            # Answered by now, unless an answer had begun: then uvicorn closes the connection.
            log_internal_error(error)
