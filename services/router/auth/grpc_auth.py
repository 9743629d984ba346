"""Refuses gRPC calls without an API key that permits them: UNAUTHENTICATED or PERMISSION_DENIED, with Baton's
error details."""

from __future__ import annotations

from typing import Any

import grpc

from baton.base.errors import BatonError
from services.common.rpc.interceptor import Continuation, ServerInterceptor, refusal
from services.router.auth.keys import Keys
from services.router.auth.scopes import GRPC_RULES, UNKNOWN, Access, grpc_rule
from services.router.tenants.current import current_caller


class GrpcAuth(ServerInterceptor):
    """Checks each call before its first message is read."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Continuation,
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
                return refusal(error)
            current_caller.set(caller)  # for the call's task, which runs this
        return await continuation(handler_call_details)
