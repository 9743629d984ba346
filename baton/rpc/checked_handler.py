"""Handlers of gRPC calls whose methods are preceded by a check: interceptors do not see a call's connection,
methods do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Method = Callable[[Any, Any], Any]
"""A method of a servicer: request or requests, context."""


def with_method(handler: Any, wrap: Callable[[Method], Method]) -> Any:  # noqa: ANN401 (grpc types none)
    """A handler like `handler`, of the same of the four kinds, whose method is `wrap` of its own."""
    streaming = handler.request_streaming, handler.response_streaming
    kind = "_".join("stream" if streams else "unary" for streams in streaming)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(wrap(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer)
