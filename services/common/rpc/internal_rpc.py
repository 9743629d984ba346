"""Internal RPCs: channels whose calls carry the cluster's token, and its check at servers.

The token is bound to the multi-callables instead of added by client interceptors, which in grpc.aio cost a
task for each call. The server checks it once for each call, before it reads the first message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from baton.base.cluster_auth import UNAUTHENTICATED, RpcToken
from baton.base.errors import BatonError, ErrorKind
from services.common.rpc.interceptor import Continuation, ServerInterceptor, refusal
from services.common.rpc.tls_channel import ChannelTls, TlsChannel


class TokenCheck(ServerInterceptor):
    """Rejects calls without the cluster's token with UNAUTHENTICATED; health checks need none."""

    def __init__(self, token: RpcToken) -> None:
        self._token = token
        self._refusal = refusal(BatonError(ErrorKind.UNAUTHENTICATED, UNAUTHENTICATED))

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 (grpc.aio does not declare the type of handlers)
        details: Any = handler_call_details
        if self._token.admits(details.method, details.invocation_metadata):
            return await continuation(handler_call_details)
        return self._refusal


class TokenChannel:
    """A `grpc.aio.Channel` for stubs whose calls carry the token."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        """Owns `channel` from now on."""
        self._channel: Any = channel
        self._metadata = RpcToken(secret).metadata

    def unary_unary(self, *args: object, **options: object) -> object:
        return self._with_token(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: object, **options: object) -> object:
        return self._with_token(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: object, **options: object) -> object:
        return self._with_token(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: object, **options: object) -> object:
        return self._with_token(self._channel.stream_stream(*args, **options))

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _with_token(self, call: Callable[..., object]) -> object:
        return partial(call, metadata=self._metadata)


def internal_channel(
    address: str, options: list[tuple[str, int]], secret: str, tls: ChannelTls | None = None
) -> grpc.aio.Channel:
    """A channel to a worker of this cluster; without a token where `secret` is empty, plaintext where `tls`
    is None."""
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = cast(grpc.aio.Channel, TlsChannel(address, options, tls))
    return cast(grpc.aio.Channel, TokenChannel(channel, secret)) if secret else channel
