"""Answers calls whose servicer fails in an unforeseen way."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from services.common.errors import abort
from services.common.observability.logs import get_log
from services.common.rpc.interceptor import Continuation, ServerInterceptor

Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Awaitable[Any]]

log = get_log(__name__)


class FaultBarrier(ServerInterceptor):
    """Ends such a call with UNAVAILABLE, which a router answers with an attempt elsewhere. gRPC itself would
    send, and log, the exception's text. For methods with one request that are no generators."""

    def __init__(self) -> None:
        # By the full name of the method; there are as many as the server has.
        self._guarded: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 (grpc.aio does not declare the type of handlers)
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        if details.method not in self._guarded:
            self._guarded[details.method] = _guarded(details.method, handler)
        return self._guarded[details.method]


def _guarded(method: str, handler: Any) -> Any:  # noqa: ANN401  as above
    behavior: Behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
    if not inspect.iscoroutinefunction(behavior):
        return handler
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )

    async def guarded(request: object, context: Context) -> object:
        try:
            return await behavior(request, context)
        except grpc.aio.BaseError:  # an abort, or a call that has ended
            raise
        except Exception as error:
            log.error("servicer_failed", method=method, error=type(error).__name__)
            await abort(context, BatonError(ErrorKind.UNAVAILABLE, "the worker failed"))

    return make(guarded, handler.request_deserializer, handler.response_serializer)
