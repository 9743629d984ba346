"""The typed gRPC client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self, Unpack

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.client.channel import CONNECT_S, OPTIONS, metadata_of
from baton.client.request import Prompt, Sampling, to_request
from baton.client.responses import Reader, to_completion, to_error
from baton.client.tls import Tls
from baton.client.types import Completion, Delta
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, ListModelsRequest
from baton.v1.router_pb2_grpc import RouterServiceStub

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

GenerateCall = grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]


class AsyncStream:
    """The deltas of one call as an async iterator. `aclose`, leaving `async with`, or cancelling the reading
    task cancels the request if it has not ended."""

    def __init__(self, start: Callable[[], Awaitable[tuple[GenerateCall, GenerateRequest]]]) -> None:
        self._start = start
        self._call: GenerateCall | None = None
        self._reader: Reader | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next delta; the first call sends the request. Raises BatonError where the call failed."""
        if self._over:
            raise StopAsyncIteration
        if self._call is None or self._reader is None:
            self._call, request = await self._start()
            self._reader = Reader(request)
        response = await self._read(self._call, self._reader)
        if response is not None:
            return self._reader.read(response)
        self._over = True
        self._reader.check_end()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels the request if it has not ended."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _read(self, call: GenerateCall, reader: Reader) -> GenerateResponse | None:
        """The next message, or None at the end."""
        try:
            response = await call.read()
        except grpc.aio.AioRpcError as error:
            self._over = True
            raise reader.error(error) from error
        except asyncio.CancelledError:
            closed, self._over = self._over, True
            task = asyncio.current_task()
            if closed and not (task is not None and task.cancelling()):
                raise StopAsyncIteration from None  # another task closed the stream
            raise
        return response if isinstance(response, GenerateResponse) else None  # grpc.aio.EOF


class AsyncClient:
    """A connection to one router, for one event loop; close it when done."""

    def __init__(
        self,
        address: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`address` is the router's gRPC `host:port`; unset, `model` is the only model that it serves.

        `api_key` is sent with each call. `tls`: unset: plaintext.

        Raises BatonError(INVALID) where a file of `tls` cannot be read. Nothing is sent yet, and a router
        that is away shows with the first call.
        """
        self._channel = (
            grpc.aio.insecure_channel(address, options=OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), options=[*OPTIONS, *tls.options()])
        )
        self._metadata = metadata_of(api_key)
        self._stub: RouterServiceAsyncStub = RouterServiceStub(self._channel)
        self._model = model

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        model: str | None = None,
        timeout: float = CONNECT_S,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> Self:
        """Creates a client and waits until the router answers. Raises BatonError(UNAVAILABLE) after `timeout`
        seconds."""
        client = cls(address, model=model, api_key=api_key, tls=tls)
        try:
            async with asyncio.timeout(timeout):
                await client._channel.channel_ready()
        except TimeoutError as error:
            await client.close()
            raise BatonError(ErrorKind.UNAVAILABLE, f"no router answers at {address}") from error
        return client

    def generate(
        self, prompt: Prompt, *, deadline: float | None = None, **sampling: Unpack[Sampling]
    ) -> AsyncStream:
        """The deltas of one request; the first `anext` sends it.

        `deadline` is in seconds from then; past it the stream raises BatonError(DEADLINE). Unset, the
        server's own limit holds.
        """

        async def start() -> tuple[GenerateCall, GenerateRequest]:
            request = to_request(await self._served(deadline), prompt, **sampling)
            return self._stub.Generate(request, timeout=deadline, metadata=self._metadata), request

        return AsyncStream(start)

    async def complete(
        self, prompt: Prompt, *, deadline: float | None = None, **sampling: Unpack[Sampling]
    ) -> Completion:
        """The whole result of `generate`."""
        async with self.generate(prompt, deadline=deadline, **sampling) as stream:
            return to_completion([delta async for delta in stream])

    async def models(self, *, deadline: float | None = CONNECT_S) -> list[str]:
        """The names of the served models."""
        try:
            response = await self._stub.ListModels(
                ListModelsRequest(), timeout=deadline, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise to_error(error) from error
        return [model.id for model in response.models]

    async def close(self) -> None:
        """Cancels running requests and closes the connection."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _served(self, deadline: float | None) -> str:
        if self._model is None:
            self._model = (await self.models(deadline=deadline or CONNECT_S))[0]
        return self._model
