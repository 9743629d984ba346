"""The receiver's side of the grpc transport: a server of its own, separate from the one that streams tokens.

    SignedOpenLink ──▶ verified ──▶ queue ──▶ the loop grants it: a wire waits for the stream with its link id
    Frames (raw bytes, link id in the metadata) ──▶ the wire with that id; a link has one stream, ever

A stream has two threads: gRPC's yields what the loop sends, and a reader reads the sender's messages and
stores pieces in staging. The end of the reader is the fence: it alone writes this link's staging, and no
second stream can use its id.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.base.addresses import join_address, listening_host
from baton.base.errors import BatonError, ErrorKind
from baton.rpc.grpc_errors import to_status
from baton.v1 import transfer_pb2_grpc
from baton.v1.transfer_pb2 import (
    GetChallengeRequest,
    GetChallengeResponse,
    OpenLinkRequest,
    OpenLinkResponse,
    SignedOpenLinkRequest,
    SignedOpenLinkResponse,
)
from kvtransfer.link.frame_queue import CONTROL_FRAMES, FrameQueue, receiver_queue
from kvtransfer.link.interfaces import UnreachableError
from kvtransfer.link.open_requests import LinkRequestQueue, RejectedCallers
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.addresses import GRPC, Endpoint
from kvtransfer.protocol.frames import FrameError, ReceiverFrame, SenderFrame, encode
from kvtransfer.protocol.link_auth import Challenges
from kvtransfer.transports.grpc.call_checks import CallCheck
from kvtransfer.transports.grpc.stream import (
    LINK_ID_KEY,
    SERVICE,
    STREAM,
    UNREACHABLE_KEY,
    SendQueue,
    channel_options,
)
from kvtransfer.transports.grpc.tls import LinkTls, ListenerTls

# Calls other than streams: challenges and link requests, health, reflection.
_OTHER_CALLS = 16
_STOP_S = 2.0


class GrpcReceiverWire:
    """One link's stream at the receiver."""

    def __init__(
        self, staging: Staging, wake: Callable[[], None], frames: FrameQueue[SenderFrame] | None = None
    ) -> None:
        """`frames`: what takes the sender's messages, where no pieces come over this stream."""
        self._frames = frames if frames is not None else receiver_queue(staging, wake)
        self._unsent = SendQueue(2 * staging.pieces + CONTROL_FRAMES)
        self._wake = wake
        self._state = threading.Lock()
        self._context: grpc.ServicerContext | None = None
        self._reader: threading.Thread | None = None
        self._closed = False

    def receive(self) -> SenderFrame | None:
        return self._frames.take()

    def send(self, frame: ReceiverFrame) -> None:
        self._unsent.add(encode(frame))

    def attached(self) -> bool:
        return self._reader is not None

    def failure(self) -> BatonError | None:
        return self._frames.closed() or self._unsent.closed

    def busy_poll(self) -> bool:
        return False

    def fenced(self) -> bool:
        with self._state:
            if self._reader is None:
                return self._closed  # closed before its stream came: serve() refuses it
            return self._closed and not self._reader.is_alive()

    def close(self, error: BatonError) -> None:
        with self._state:
            self._closed = True
            self._frames.close(error)
            self._unsent.close(error)

    def serve(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Runs in gRPC's thread for as long as the stream lives; yields what the loop sends."""
        with self._state:
            if self._closed or self._reader is not None:
                raise BatonError(ErrorKind.UNAVAILABLE, "the link was closed")
            self._reader = threading.Thread(
                target=self._read, args=(messages,), name="link-reader", daemon=True
            )
            self._reader.start()
        ended = BatonError(ErrorKind.UNAVAILABLE, "the sender's stream ended")
        if not context.add_callback(lambda: self._unsent.close(ended)):
            self._unsent.close(ended)
        yield from self._unsent
        raise self._unsent.closed or ended

    def _read(self, messages: Iterator[bytes]) -> None:
        """The only thread that writes this link's staging."""
        try:
            for message in messages:
                if self._closed:
                    break
                self._frames.accept(message)
            self._frames.close(BatonError(ErrorKind.UNAVAILABLE, "the sender's stream ended"))
        except FrameError as error:
            self._frames.close(error)
            self._unsent.close(error)
        except grpc.RpcError:  # gRPC ends the iteration of a cancelled or broken call so
            self._frames.close(BatonError(ErrorKind.UNAVAILABLE, "the sender's stream broke"))


class GrpcLinkRequest:
    """A request between gRPC's thread, which waits, and the loop, which answers."""

    def __init__(self, listener: GrpcListener, request: OpenLinkRequest) -> None:
        self.request = request
        self.answer: Future[OpenLinkResponse] = Future()
        self._listener = listener

    @property
    def device(self) -> None:
        """Returns None: bytes come to the host."""

    def window(self, pieces: int, piece_bytes: int) -> None:
        """Returns None: messages bring their pieces."""

    def grant(
        self, response: OpenLinkResponse, staging: Staging, frames: FrameQueue[SenderFrame] | None = None
    ) -> GrpcReceiverWire:
        wire = self._listener.export(response.link_id, staging, frames)
        self.answer.set_result(response)
        return wire

    def refuse(self, error: BatonError) -> None:
        self.answer.set_exception(error)


class GrpcListener(transfer_pb2_grpc.TransferServiceServicer):
    """TransferService, its raw stream, health and reflection on one port."""

    def __init__(
        self,
        host: str,
        port: int,
        settings: ListenerSettings,
        *,
        piece_bytes: int,
        tls: LinkTls | None = None,
        listen_host: str | None = None,
    ) -> None:
        """`host`: the address that senders are told; `listen_host`: the one that is bound; None: the same.
        `tls`: None: plaintext. BatonError(INVALID) where it cannot bind."""
        self._wake = settings.wake
        server_tls = None if tls is None else tls.server()
        self._auth = settings.auth
        self._challenges = Challenges()
        self.rejected = RejectedCallers(GRPC)
        self._requests: LinkRequestQueue[GrpcLinkRequest] = LinkRequestQueue(
            _OTHER_CALLS, settings.peer_timeout_s, settings.wake
        )
        # Wires whose stream has not come yet; the next export removes closed ones.
        self._waiting: dict[int, GrpcReceiverWire] = {}
        self._wires: list[GrpcReceiverWire] = []
        self._lock = threading.Lock()
        workers = 2 * settings.max_links + _OTHER_CALLS
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="transfer")
        self._server = grpc.server(
            self._pool,
            options=channel_options(piece_bytes, settings.peer_timeout_s),
            maximum_concurrent_rpcs=workers,
            interceptors=[CallCheck(self._auth.token, server_tls, self._refuse_call)],
        )
        self._health = health.HealthServicer()
        self._mount()
        self.endpoint = Endpoint(GRPC, join_address(host, self._bind(listen_host or host, port, server_tls)))
        self._server.start()

    def _mount(self) -> None:
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self, self._server)
        stream = grpc.stream_stream_rpc_method_handler(self._frames)
        raw = grpc.method_handlers_generic_handler(SERVICE, {STREAM: stream})
        self._server.add_generic_rpc_handlers((raw,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _bind(self, host: str, port: int, tls: ListenerTls | None) -> int:
        address = join_address(listening_host(host), port)
        try:
            if tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError:
            bound = 0
        if bound == 0:
            self._pool.shutdown(wait=False)
            raise BatonError(ErrorKind.INVALID, f"cannot listen on {address} for transfers")
        return bound

    # -- the loop ---------------------------------------------------------------------------------

    def next_request(self) -> GrpcLinkRequest | None:
        return self._requests.next()

    def export(
        self, link_id: int, staging: Staging, frames: FrameQueue[SenderFrame] | None
    ) -> GrpcReceiverWire:
        """A wire for the stream with this link id."""
        wire = GrpcReceiverWire(staging, self._wake, frames)
        with self._lock:
            self._wires = [other for other in self._wires if not other.fenced()]
            self._wires.append(wire)
            self._waiting = {key: other for key, other in self._waiting.items() if not other.fenced()}
            self._waiting[link_id] = wire
        return wire

    def close(self) -> None:
        closing = BatonError(ErrorKind.UNAVAILABLE, "the receiver closes")
        self._health.enter_graceful_shutdown()
        for wire in self._wires:
            wire.close(closing)
        self._requests.refuse_all(closing)
        self._server.stop(grace=None).wait(_STOP_S)
        self._pool.shutdown(wait=False)

    # -- gRPC's threads ---------------------------------------------------------------------------

    def GetChallenge(  # noqa: N802
        self, request: GetChallengeRequest, context: grpc.ServicerContext
    ) -> GetChallengeResponse:
        return GetChallengeResponse(challenge=self._challenges.issue())

    def SignedOpenLink(  # noqa: N802
        self, request: SignedOpenLinkRequest, context: grpc.ServicerContext
    ) -> SignedOpenLinkResponse:
        try:
            asked = GrpcLinkRequest(self, self._auth.verify_hello(request, self._challenges))
            return self._auth.answer(request, self._requests.ask(asked, asked.answer))
        except BatonError as error:
            if error.kind is ErrorKind.UNAUTHENTICATED:
                self.rejected.add(error.message)
            _abort(context, error)

    def _frames(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        wire = self._take_wire(context)
        try:
            yield from wire.serve(messages, context)
        except BatonError as error:
            _abort(context, error)

    def _refuse_call(self, context: grpc.ServicerContext, reason: str) -> NoReturn:
        self.rejected.add(f"a call from {context.peer()}: {reason}")
        _abort(context, BatonError(ErrorKind.UNAUTHENTICATED, reason))

    def _take_wire(self, context: grpc.ServicerContext) -> GrpcReceiverWire:
        """Takes the wire of the link that this stream names; each link id is valid for one stream."""
        metadata = dict(context.invocation_metadata())
        named = metadata.get(LINK_ID_KEY, "")
        if not (isinstance(named, str) and named.isascii() and named.isdigit() and len(named) <= 20):
            _abort(context, BatonError(ErrorKind.INVALID, f"metadata {LINK_ID_KEY} must be a link id"))
        with self._lock:
            wire = self._waiting.pop(int(named), None)
        if wire is None:
            _abort(context, BatonError(ErrorKind.CONFLICT, f"no link {named} waits for a stream"))
        return wire


def _abort(context: grpc.ServicerContext, error: BatonError) -> NoReturn:
    """Ends the call with the error's status and details."""
    status = to_status(error)
    metadata = tuple(status.trailing_metadata or ())
    if isinstance(error, UnreachableError):
        metadata += ((UNREACHABLE_KEY, "1"),)
    context.set_trailing_metadata(metadata)
    context.abort(status.code, status.details)
    raise AssertionError("abort always raises")
