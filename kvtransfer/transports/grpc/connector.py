"""The sender's side of the grpc transport: a channel of its own for each link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.rpc.grpc_errors import DETAILS_KEY, from_status
from baton.v1 import transfer_pb2_grpc
from baton.v1.transfer_pb2 import GetChallengeRequest, OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.frame_queue import CONTROL_FRAMES, sender_queue
from kvtransfer.link.interfaces import UnreachableError
from kvtransfer.protocol.addresses import GRPC, Endpoint
from kvtransfer.protocol.frames import (
    FrameError,
    Piece,
    ReceiverFrame,
    SenderControl,
    encode,
    encode_piece_header,
)
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.stream import (
    CONNECT_TIMEOUT_S,
    LINK_ID_KEY,
    STREAM_METHOD,
    UNREACHABLE_KEY,
    SendQueue,
    channel_options,
)
from kvtransfer.transports.grpc.tls import LinkTls


class GrpcSenderWire:
    """One link's stream at the sender; owns its channel."""

    on_device = False
    shares_clock = False

    def __init__(
        self,
        channel: grpc.Channel,
        response: OpenLinkResponse,
        wake: Callable[[], None],
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        """`metadata`: of every call to the receiver: the cluster's token."""
        self._channel = channel
        self._frames = sender_queue(response.window_pieces, wake)
        # A piece needs a credit, so at most a window of them waits here.
        self._unsent = SendQueue(response.window_pieces + CONTROL_FRAMES)
        stream = channel.stream_stream(STREAM_METHOD, request_serializer=None, response_deserializer=None)
        self._call = stream(iter(self._unsent), metadata=((LINK_ID_KEY, str(response.link_id)), *metadata))
        reader = threading.Thread(target=self._read, args=(self._call,), name="link-reader", daemon=True)
        reader.start()

    def put(self, piece: Piece, payload: memoryview) -> None:
        self._unsent.add(b"".join((encode_piece_header(piece), payload)))

    def send(self, frame: SenderControl) -> None:
        self._unsent.add(encode(frame))

    def receive(self) -> ReceiverFrame | None:
        return self._frames.take()

    def failure(self) -> BatonError | None:
        return self._frames.closed() or self._unsent.closed

    def close(self) -> None:
        closed = BatonError(ErrorKind.UNAVAILABLE, "the sender closed the link")
        self._frames.close(closed)
        self._unsent.close(closed)
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._channel.close()

    def _read(self, messages: Iterable[bytes]) -> None:
        error = BatonError(ErrorKind.UNAVAILABLE, "the receiver's stream ended")
        try:
            for message in messages:
                self._frames.accept(message)
        except FrameError as malformed:
            error = malformed
        except grpc.RpcError as broken:
            error = BatonError(ErrorKind.UNAVAILABLE, _details(broken))
        self._frames.close(error)
        self._unsent.close(error)
        self._call.cancel()  # type: ignore[no-untyped-call]


class GrpcConnector:
    """Opens links to receivers over gRPC."""

    transport = GRPC

    def __init__(
        self, wake: Callable[[], None], auth: LinkAuth | None = None, tls: LinkTls | None = None
    ) -> None:
        """`tls`: None for plaintext."""
        self._wake = wake
        self._auth = auth or LinkAuth()
        self._tls = tls

    def reaches(self, endpoint: Endpoint) -> bool:
        return endpoint.transport == GRPC

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, GrpcSenderWire]:
        address = endpoint.address
        channel = self._channel(endpoint, timeout_s)
        try:
            _connect(channel, min(timeout_s, CONNECT_TIMEOUT_S))
            response = self._ask(transfer_pb2_grpc.TransferServiceStub(channel), request, timeout_s)
        except BatonError:
            channel.close()
            raise
        except grpc.RpcError as error:
            channel.close()
            raise _refusal(error, f"no link to {address}: {_details(error)}") from error
        except TimeoutError as error:
            channel.close()
            raise BatonError(ErrorKind.UNAVAILABLE, f"no link to {address}: {error}") from error
        return response, GrpcSenderWire(channel, response, self._wake, self._auth.token.metadata)

    def _channel(self, endpoint: Endpoint, timeout_s: float) -> grpc.Channel:
        """Raises BatonError where no certificate of the endpoint is trusted."""
        # A sender receives no pieces, so the default limits suffice on its side.
        options: list[tuple[str, object]] = [*channel_options(0, timeout_s)]
        if self._tls is None:
            return grpc.insecure_channel(endpoint.address, options=options)
        try:
            credentials, more = self._tls.arguments(endpoint.certificates)
        except BatonError as error:
            raise BatonError(error.kind, f"no link to {endpoint.address}: {error.message}") from error
        return grpc.secure_channel(endpoint.address, credentials, options=[*options, *more])

    def _ask(
        self, receiver: transfer_pb2_grpc.TransferServiceStub, request: OpenLinkRequest, timeout_s: float
    ) -> OpenLinkResponse:
        """Requests the link. grpc.RpcError; BatonError where the receiver does not know the cluster's
        secret."""
        deadline, metadata = time.monotonic() + timeout_s, self._auth.token.metadata
        given = receiver.GetChallenge(GetChallengeRequest(), timeout=timeout_s, metadata=metadata)
        hello = self._auth.hello(request, given.challenge)
        left_s = max(0.001, deadline - time.monotonic())
        answer = receiver.SignedOpenLink(hello, timeout=left_s, metadata=metadata)
        return self._auth.verify_answer(hello, answer)


def _connect(channel: grpc.Channel, timeout_s: float) -> None:
    """Blocks until a call would be sent or fail at once; TimeoutError where nothing answers at that port."""
    decided = threading.Event()

    def changed(state: grpc.ChannelConnectivity) -> None:
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            decided.set()

    channel.subscribe(changed, try_to_connect=True)
    answered = decided.wait(timeout_s)
    channel.unsubscribe(changed)
    if not answered:
        raise TimeoutError(f"no answer for {timeout_s:g} s")


def _refusal(error: grpc.RpcError, message: str) -> BatonError:
    """Converts a failed call to an error for the link's transfers. A status without a Baton error's details
    comes from gRPC itself or from another server: except for limits and time-outs it is UNAVAILABLE."""
    if not isinstance(error, grpc.Call):
        return BatonError(ErrorKind.UNAVAILABLE, message)
    metadata = tuple(error.trailing_metadata() or ())
    keys = {key for key, _ in metadata}
    if UNREACHABLE_KEY in keys:
        return UnreachableError(message)
    kind = from_status(error.code(), error.details(), metadata).kind
    if DETAILS_KEY not in keys and kind not in (ErrorKind.OVERLOADED, ErrorKind.DEADLINE):
        kind = ErrorKind.UNAVAILABLE
    return BatonError(kind, message)


def _details(error: grpc.RpcError) -> str:
    return str(error.details()) if isinstance(error, grpc.Call) else str(error)
