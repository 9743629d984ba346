"""The sender's side of the grpc transport: a channel of its own for each link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import grpc

from baton.errors import BatonError, ErrorKind
from baton.v1 import transfer_pb2_grpc
from baton.v1.transfer_pb2 import GetChallengeRequest, OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.frame_queue import CONTROL_FRAMES, SenderInbox
from kvtransfer.link.interfaces import OutOfReachError
from kvtransfer.protocol.addresses import IPC_SCHEME, NCCL_SCHEME
from kvtransfer.protocol.frames import FrameError, Piece, ReceiverFrame, Words, encode, encode_piece_header
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.stream import (
    CONNECT_S,
    ERROR_KIND_KEY,
    LINK_ID_KEY,
    OTHER_WAY_KEY,
    STREAM_METHOD,
    TRANSPORT,
    Outbox,
    channel_options,
)

_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.DEADLINE,
}


class GrpcSenderWire:
    """One link's stream at the sender. The channel belongs to it."""

    def __init__(
        self,
        channel: grpc.Channel,
        response: OpenLinkResponse,
        wake: Callable[[], None],
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        """`metadata`: what a call to the receiver carries, the cluster's token."""
        self._channel = channel
        self._inbox = SenderInbox(response.window_pieces, wake)
        # A piece needs a credit, so a window of them at most waits here.
        self._outbox = Outbox(response.window_pieces + CONTROL_FRAMES)
        stream = channel.stream_stream(STREAM_METHOD, request_serializer=None, response_deserializer=None)
        self._call = stream(iter(self._outbox), metadata=((LINK_ID_KEY, str(response.link_id)), *metadata))
        reader = threading.Thread(target=self._read, args=(self._call,), name="link-answers", daemon=True)
        reader.start()

    @property
    def gathers(self) -> bool:
        return False

    def put(self, piece: Piece, payload: memoryview) -> None:
        self._outbox.add(b"".join((encode_piece_header(piece), payload)))

    def tell(self, frame: Words) -> None:
        self._outbox.add(encode(frame))

    def hear(self) -> ReceiverFrame | None:
        return self._inbox.take()

    def broken(self) -> BatonError | None:
        return self._inbox.closed() or self._outbox.closed

    def close(self) -> None:
        closed = BatonError(ErrorKind.UNAVAILABLE, "the sender closed the link")
        self._inbox.close(closed)
        self._outbox.close(closed)
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._channel.close()

    def _read(self, messages: Iterable[bytes]) -> None:
        error = BatonError(ErrorKind.UNAVAILABLE, "the receiver's stream ended")
        try:
            for message in messages:
                self._inbox.accept(message)
        except FrameError as malformed:
            error = malformed
        except grpc.RpcError as broken:
            error = BatonError(ErrorKind.UNAVAILABLE, _details(broken))
        self._inbox.close(error)
        self._outbox.close(error)
        self._call.cancel()  # type: ignore[no-untyped-call]


class GrpcConnector:
    """Opens links over grpc."""

    transport = TRANSPORT

    def __init__(self, wake: Callable[[], None], auth: LinkAuth | None = None) -> None:
        self._wake = wake
        self._auth = auth or LinkAuth()

    def takes(self, address: str) -> bool:
        return not address.startswith((IPC_SCHEME, NCCL_SCHEME))

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, GrpcSenderWire]:
        # A sender receives no pieces, so the default limits do on its side.
        channel = grpc.insecure_channel(address, options=channel_options(0, timeout_s))
        try:
            _connect(channel, min(timeout_s, CONNECT_S))
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

    def _ask(
        self, receiver: transfer_pb2_grpc.TransferServiceStub, request: OpenLinkRequest, timeout_s: float
    ) -> OpenLinkResponse:
        """For the link. grpc.RpcError; `BatonError` where the receiver does not know the cluster's secret."""
        deadline, metadata = time.monotonic() + timeout_s, self._auth.token.metadata
        given = receiver.GetChallenge(GetChallengeRequest(), timeout=timeout_s, metadata=metadata)
        hello = self._auth.hello(request, given.challenge)
        left_s = max(0.001, deadline - time.monotonic())
        answer = receiver.SignedOpenLink(hello, timeout=left_s, metadata=metadata)
        return self._auth.verify_answer(hello, answer)


def _connect(channel: grpc.Channel, timeout_s: float) -> None:
    """Waits until a call would go out or fail at once; `TimeoutError` where nobody speaks at that port."""
    settled = threading.Event()

    def changed(state: grpc.ChannelConnectivity) -> None:
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            settled.set()

    channel.subscribe(changed, try_to_connect=True)
    spoke = settled.wait(timeout_s)
    channel.unsubscribe(changed)
    if not spoke:
        raise TimeoutError(f"nobody answers there for {timeout_s:g} s")


def _refusal(error: grpc.RpcError, message: str) -> BatonError:
    if not isinstance(error, grpc.Call):
        return BatonError(ErrorKind.UNAVAILABLE, message)
    told = dict(error.trailing_metadata() or ())
    if OTHER_WAY_KEY in told:
        return OutOfReachError(message)
    if (kind := str(told.get(ERROR_KIND_KEY))) in ErrorKind.__members__:
        return BatonError(ErrorKind[kind], message)
    return BatonError(_KINDS.get(error.code(), ErrorKind.UNAVAILABLE), message)


def _details(error: grpc.RpcError) -> str:
    return str(error.details()) if isinstance(error, grpc.Call) else str(error)
