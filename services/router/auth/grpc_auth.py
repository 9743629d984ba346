"""Refuses gRPC calls without an API key that permits them: UNAUTHENTICATED or PERMISSION_DENIED, with Baton's
error details."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton.errors import BatonError
from services.common.errors import abort
from services.router.auth.keys import Keys
from services.router.auth.scopes import GRPC_RULES, UNKNOWN, Access, grpc_rule
from services.router.tenants.current import current_caller

if TYPE_CHECKING:  # generic in its stub file only
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.aio.ServerInterceptor


class GrpcAuth(_ServerInterceptor):
    """Checks each call before its first message is read."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 (grpc.aio does not declare the type of handlers)
        details: Any = handler_call_details
        rule = grpc_rule(details.method)
        if rule is not Access.OPEN:
            given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
            try:
                route = details.method if details.method in GRPC_RULES else UNKNOWN
                caller = self._keys.authenticate(given[0] if len(given) == 1 else None, "grpc", rule, route)
            except BatonError as error:
                return _refusal(error)
            current_caller.set(caller)  # for the call's task, which runs this
        return await continuation(handler_call_details)


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """A stream handler, which answers unary calls as well and reads no message."""

    async def refuse(messages: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
