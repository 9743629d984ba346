"""A channel whose every call carries a cluster's token, for stubs made without it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import grpc

from kvtransfer.protocol.link_auth import LinkAuth

_Details = namedtuple(
    "_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
)


class _Token(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, auth: LinkAuth) -> None:
        self._metadata = auth.token.metadata

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(self._with_token(details), requests)

    def _with_token(self, details: Any) -> Any:
        metadata = (*(details.metadata or ()), *self._metadata)
        return _Details(details.method, details.timeout, metadata, details.credentials, None, None)


def with_token(channel: grpc.Channel, auth: LinkAuth) -> grpc.Channel:
    return grpc.intercept_channel(channel, _Token(auth))
