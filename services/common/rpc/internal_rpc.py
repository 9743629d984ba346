"""Internal RPCs: channels whose calls carry the cluster's token.

The token is bound to the multi-callables instead of added by client interceptors, which in grpc.aio cost a
task for each call. The server's `CallCheck` looks at it once for each call.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from baton.base.cluster_auth import RpcToken
from services.common.rpc.tls_channel import ChannelTls, StubChannel, TlsChannel


class TokenChannel(StubChannel):
    """A `grpc.aio.Channel` for stubs whose calls carry the token."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        """Owns `channel` from now on."""
        self._channel: Any = channel
        self._metadata = RpcToken(secret).metadata

    def multi_callable(self, shape: str, args: tuple[object, ...], options: dict[str, object]) -> object:
        return partial(getattr(self._channel, shape)(*args, **options), metadata=self._metadata)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)


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
