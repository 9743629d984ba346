"""The typed gRPC client for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, Unpack

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.client.channel import CONNECT_S, OPTIONS, metadata_of
from baton.client.request import Prompt, Sampling, to_request
from baton.client.responses import Reader, to_completion, to_error
from baton.client.tls import Tls
from baton.client.types import Completion, Delta
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, ListModelsRequest
from baton.v1.router_pb2_grpc import RouterServiceStub

if TYPE_CHECKING:
    GenerateCall = grpc.CallIterator[GenerateResponse]


class Stream:
    """The deltas of one call as an iterator. `close`, or leaving `with`, cancels the request if it has not
    ended."""

    def __init__(self, call: GenerateCall, request: GenerateRequest) -> None:
        self._call = call
        self._messages = iter(call)
        self._reader = Reader(request)
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """The next delta. Raises BatonError where the call failed."""
        if self._over:
            raise StopIteration
        try:
            return self._reader.read(next(self._messages))
        except StopIteration:
            self._over = True
            self._reader.check_end()
            raise
        except grpc.RpcError as error:
            if self._over:  # closed by another thread
                raise StopIteration from None
            self._over = True
            raise self._reader.error(error) from error

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self._over = True
        self._call.cancel()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Client:
    """A connection to one router. Safe to use from many threads; close it when done."""

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
            grpc.insecure_channel(address, options=OPTIONS)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options=[*OPTIONS, *tls.options()])
        )
        self._metadata = metadata_of(api_key)
        self._stub = RouterServiceStub(self._channel)
        self._model = model

    @classmethod
    def connect(
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
            grpc.channel_ready_future(client._channel).result(timeout)
        except grpc.FutureTimeoutError as error:
            client.close()
            raise BatonError(ErrorKind.UNAVAILABLE, f"no router answers at {address}") from error
        return client

    def generate(
        self, prompt: Prompt, *, deadline: float | None = None, **sampling: Unpack[Sampling]
    ) -> Stream:
        """Starts a request and returns its deltas.

        `deadline` is in seconds from now; past it the stream raises BatonError(DEADLINE). Unset, the
        server's own limit holds.
        """
        request = to_request(self._served(deadline), prompt, **sampling)
        return Stream(self._stub.Generate(request, timeout=deadline, metadata=self._metadata), request)

    def complete(
        self, prompt: Prompt, *, deadline: float | None = None, **sampling: Unpack[Sampling]
    ) -> Completion:
        """The whole result of `generate`."""
        with self.generate(prompt, deadline=deadline, **sampling) as stream:
            return to_completion(list(stream))

    def models(self, *, deadline: float | None = CONNECT_S) -> list[str]:
        """The names of the served models."""
        try:
            response = self._stub.ListModels(ListModelsRequest(), timeout=deadline, metadata=self._metadata)
        except grpc.RpcError as error:
            raise to_error(error) from error
        return [model.id for model in response.models]

    def close(self) -> None:
        """Cancels running requests and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _served(self, deadline: float | None) -> str:
        if self._model is None:
            self._model = self.models(deadline=deadline or CONNECT_S)[0]
        return self._model
