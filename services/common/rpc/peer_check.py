"""Checks at each call that the connection's peer has a certificate of a role that the server admits."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.rpc.checked_handler import Method, with_method
from services.common.errors import abort
from services.common.rpc.interceptor import Continuation, ServerInterceptor

if TYPE_CHECKING:
    from baton.tls.server import ServerTls


class PeerCheck(ServerInterceptor):
    """Rejects other peers with PERMISSION_DENIED before a method runs; all methods, health checks too.

    Interceptors do not see the connection, so the methods are wrapped: a call costs one check, its messages
    cost nothing.
    """

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        # By the inner handler, of which there is one for each method.
        self._wrapped: dict[int, tuple[object, object]] = {}

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 (grpc.aio does not declare the type of handlers)
        inner = await continuation(handler_call_details)
        if inner is None:
            return None
        found = self._wrapped.get(id(inner))
        if found is None or found[0] is not inner:
            found = self._wrapped[id(inner)] = (inner, with_method(inner, self._checked))
        return found[1]

    def _checked(self, method: Method) -> Method:
        """The method behind the check, of the same kind: grpc.aio looks whether it is a generator."""

        async def stream(request: object, context: Any) -> AsyncIterator[object]:  # noqa: ANN401
            await self._admit(context)
            async for response in method(request, context):
                yield response

        async def call(request: object, context: Any) -> object:  # noqa: ANN401
            await self._admit(context)
            response = method(request, context)
            return await response if inspect.isawaitable(response) else response

        return stream if inspect.isasyncgenfunction(method) else call

    async def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        refusal = self._tls.refusal(context.auth_context())
        if refusal:
            await abort(context, BatonError(ErrorKind.FORBIDDEN, refusal))
