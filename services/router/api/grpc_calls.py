"""Assigns each gRPC call its id and span, which its answer names, also if it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from services.common.rpc.interceptor import Continuation, ServerInterceptor
from services.router.request.call_trace import CallTrace
from services.router.request.current_call import begin_call


class GrpcCalls(ServerInterceptor):
    """The first of a server's interceptors."""

    def __init__(self, trace_of: Callable[[Mapping[str, str]], CallTrace | None]) -> None:
        """`trace_of`: the trace of a call with this metadata; None where traces are off."""
        self._trace_of = trace_of

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 (grpc.aio does not declare the type of handlers)
        details: Any = handler_call_details
        trace = self._trace_of(texts_of(details.invocation_metadata))
        begin_call(trace)  # for the call's task, which runs this
        return await continuation(handler_call_details)


def texts_of(metadata: Any) -> dict[str, str]:  # noqa: ANN401 (grpc.aio does not declare it)
    """A call's metadata, without what is not text."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}
