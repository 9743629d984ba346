"""A channel over TLS whose certificates and trusted peers may change while it is used.

A gRPC channel keeps the credentials that it was made with, for every reconnect. So new calls go over a new
channel once they have changed; the one before is closed when its last call has ended.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio


class ChannelTls(Protocol):
    """The TLS of a channel's connections; `baton.tls.mutual.PeerTls` is one."""

    def state(self) -> object:
        """Differs where new connections need other credentials. Called at each call."""

    def arguments(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials and further options of a channel."""


class StubChannel(ABC):
    """The part of a `grpc.aio.Channel` that stubs use."""

    @abstractmethod
    def multi_callable(self, shape: str, args: tuple[object, ...], options: dict[str, object]) -> object:
        """A method's multi-callable of this shape, such as `unary_unary`, made with these arguments."""

    @abstractmethod
    async def close(self, grace: float | None = None) -> None:
        """Closes the connections of the channel."""

    def unary_unary(self, *args: object, **options: object) -> object:
        return self.multi_callable("unary_unary", args, options)

    def unary_stream(self, *args: object, **options: object) -> object:
        return self.multi_callable("unary_stream", args, options)

    def stream_unary(self, *args: object, **options: object) -> object:
        return self.multi_callable("stream_unary", args, options)

    def stream_stream(self, *args: object, **options: object) -> object:
        return self.multi_callable("stream_stream", args, options)

    async def __aenter__(self) -> StubChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class TlsChannel(StubChannel):
    """Makes new calls over a channel whose credentials are the latest."""

    def __init__(self, address: str, options: list[tuple[str, int]], tls: ChannelTls) -> None:
        self._address = address
        self._options = options
        self.tls = tls
        self._latest: _Connected | None = None
        self._open: set[_Connected] = set()

    def multi_callable(self, shape: str, args: tuple[object, ...], options: dict[str, object]) -> object:
        return _Method(self, shape, args, options)

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(one.channel.close(grace) for one in self._open))

    def latest(self) -> _Connected:
        """The channel for new calls."""
        state = self.tls.state()
        found = self._latest
        if found is None or found.state != state:
            credentials, more = self.tls.arguments()
            channel = grpc.aio.secure_channel(self._address, credentials, options=[*self._options, *more])
            if found is not None:
                found.retire()
            found = self._latest = _Connected(channel, state, self._open.discard)
            self._open.add(found)
        return found


class _Connected:
    """One gRPC channel and the number of its calls."""

    def __init__(
        self, channel: grpc.aio.Channel, state: object, on_closed: Callable[[_Connected], None]
    ) -> None:
        self.channel = channel
        self.state = state
        self._on_closed = on_closed
        self._calls = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    def started(self, call: Any) -> None:  # noqa: ANN401 (any kind of call)
        self._calls += 1
        call.add_done_callback(self._ended)

    def retire(self) -> None:
        """Closes the channel after its last call."""
        self._retired = True
        if not self._calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    def _ended(self, call: object) -> None:
        self._calls -= 1
        if self._retired:
            self.retire()

    async def _close(self) -> None:
        await self.channel.close(None)
        self._on_closed(self)


class _Method:
    """A multi-callable that calls over the latest channel."""

    def __init__(
        self, owner: TlsChannel, shape: str, args: tuple[object, ...], options: dict[str, object]
    ) -> None:
        self._owner = owner
        self._make = (shape, args, options)
        self._bound: tuple[_Connected, Any] | None = None

    def __call__(self, *args: object, **options: object) -> object:
        latest = self._owner.latest()
        if self._bound is None or self._bound[0] is not latest:
            shape, made_with, made_options = self._make
            self._bound = (latest, getattr(latest.channel, shape)(*made_with, **made_options))
        call = self._bound[1](*args, **options)
        latest.started(call)
        return call
