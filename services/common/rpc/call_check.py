"""Checks at each call, before its first message is read, that it comes from a member of the cluster."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton.base.cluster_auth import UNAUTHENTICATED, RpcToken
from baton.base.errors import BatonError, ErrorKind
from baton.rpc.checked_handler import Method, with_method
from services.common.errors import abort
from services.common.rpc.interceptor import Continuation, ServerInterceptor, refusal

if TYPE_CHECKING:
    from baton.tls.server import ServerTls


class CallCheck(ServerInterceptor):
    """Rejects calls without the cluster's token with UNAUTHENTICATED, health checks excepted, and calls of
    peers whose certificate has no role that the server admits with PERMISSION_DENIED, health checks too.

    Interceptors do not see the connection, so the methods are wrapped: a call costs one check, its messages
    cost nothing.
    """

    def __init__(self, token: RpcToken | None, tls: ServerTls | None) -> None:
        """`token` None: calls need none. `tls` None: any peer is admitted."""
        self._token = token
        self._tls = tls
        self._refusal = refusal(BatonError(ErrorKind.UNAUTHENTICATED, UNAUTHENTICATED))
        # By the inner handler, of which there is one for each method.
        self._wrapped: dict[int, tuple[object, object]] = {}

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 (grpc.aio does not declare the type of handlers)
        details: Any = handler_call_details
        if self._token is not None and not self._token.admits(details.method, details.invocation_metadata):
            return self._refusal
        inner = await continuation(handler_call_details)
        if inner is None or self._tls is None:
            return inner
        found = self._wrapped.get(id(inner))
        if found is None or found[0] is not inner:
            checked = with_method(inner, partial(_checked, self._tls))
            found = self._wrapped[id(inner)] = (inner, checked)
        return found[1]


def _checked(tls: ServerTls, method: Method) -> Method:
    """The method behind the check, of the same kind: grpc.aio looks whether it is a generator."""

    async def stream(request: object, context: Any) -> AsyncIterator[object]:  # noqa: ANN401
        await _admit(tls, context)
        async for response in method(request, context):
            yield response

    async def call(request: object, context: Any) -> object:  # noqa: ANN401
        await _admit(tls, context)
        response = method(request, context)
        return await response if inspect.isawaitable(response) else response

    return stream if inspect.isasyncgenfunction(method) else call


async def _admit(tls: ServerTls, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    refused = tls.refusal(context.auth_context())
    if refused:
        await abort(context, BatonError(ErrorKind.FORBIDDEN, refused))
