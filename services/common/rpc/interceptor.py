"""Code that interceptors of gRPC servers share: types that grpc.aio does not declare, and refusals of
calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton.base.errors import BatonError
from services.common.errors import abort

if TYPE_CHECKING:  # generic in its stub file only
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    ServerInterceptor = grpc.aio.ServerInterceptor

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
"""Finds the handler of a call, through the interceptors that follow."""


def refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler that answers a call with `error`: a stream handler, which answers unary calls as well and
    reads no message."""

    async def refuse(messages: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
