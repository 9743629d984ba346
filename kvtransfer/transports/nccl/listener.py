"""Accepts nccl links; `endpoint` describes the protocol."""

from __future__ import annotations

from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.link_device import LinkDevice
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.frame_queue import FrameQueue
from kvtransfer.link.interfaces import LinkRequest
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.addresses import NCCL, Endpoint
from kvtransfer.protocol.frames import FrameError, SenderFrame
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.listener import GrpcLinkRequest, GrpcListener
from kvtransfer.transports.grpc.tls import LinkTls
from kvtransfer.transports.nccl.endpoint import RECEIVER_RANK, NcclEndpoint
from kvtransfer.transports.nccl.frame_acceptor import FrameAcceptor
from kvtransfer.transports.nccl.receiver_wire import NcclReceiverWire


def _no_frames(message: bytes) -> SenderFrame:
    raise FrameError("frames of this link do not come over its keepalive stream")


class _NcclLinkRequest:
    """A request that came over gRPC, and the channel that its link will have."""

    def __init__(
        self,
        request: GrpcLinkRequest,
        nccl: NcclEndpoint,
        acceptor: FrameAcceptor,
        wake: Callable[[], None],
        auth: LinkAuth,
    ) -> None:
        self.request: OpenLinkRequest = request.request
        self._over_grpc = request
        self._nccl = nccl
        self._acceptor = acceptor
        self._wake = wake
        self._auth = auth
        self._window: PieceMemory | None = None

    @property
    def device(self) -> LinkDevice:
        return self._nccl.device

    def window(self, pieces: int, piece_bytes: int) -> PieceMemory:
        try:
            self._window = self._nccl.staging(pieces, piece_bytes)
        except (OSError, RuntimeError) as error:
            raise BatonError(ErrorKind.OVERLOADED, f"no memory for a link: {error}") from error
        return self._window

    def grant(self, response: OpenLinkResponse, staging: Staging) -> NcclReceiverWire:
        assert self._window is not None, "staging is made of the request's window"
        response.nccl_id = self._nccl.unique_id()
        response.frames_port = self._acceptor.port
        channel = self._nccl.channel(response.nccl_id, RECEIVER_RANK, self._wake)
        accepted = self._acceptor.expect(self._auth.frames_secret(response.nccl_id))
        no_frames: FrameQueue[SenderFrame] = FrameQueue(1, _no_frames, self._wake)
        keepalive = self._over_grpc.grant(response, staging, no_frames)
        return NcclReceiverWire(self._nccl, channel, self._window, staging, keepalive, accepted, self._wake)

    def refuse(self, error: BatonError) -> None:
        self._over_grpc.refuse(error)


class NcclListener:
    """A gRPC listener of its own, for requests and keepalive streams, and an acceptor of frame sockets."""

    def __init__(
        self,
        host: str,
        port: int,
        settings: ListenerSettings,
        nccl: NcclEndpoint,
        *,
        frames_port: int = 0,
        tls: LinkTls | None = None,
        listen_host: str | None = None,
    ) -> None:
        """`host`, `listen_host`: as for `GrpcListener`. `frames_port`: for the links' frames; 0: any
        free one. `tls`: of the requests and keepalive streams; the frames and what NCCL sends are plaintext.
        BatonError(INVALID) where it cannot bind."""
        self._auth, self._wake = settings.auth, settings.wake
        self._over_grpc = GrpcListener(host, port, settings, piece_bytes=0, tls=tls, listen_host=listen_host)
        self._nccl = nccl
        self.endpoint = Endpoint(NCCL, self._over_grpc.endpoint.address)
        try:
            self._acceptor = FrameAcceptor(listen_host or host, settings.wake, frames_port)
        except BatonError:
            self._over_grpc.close()
            raise

    def next_request(self) -> LinkRequest | None:
        request = self._over_grpc.next_request()
        if request is None:
            return None
        return _NcclLinkRequest(request, self._nccl, self._acceptor, self._wake, self._auth)

    def close(self) -> None:
        self._acceptor.close()
        self._over_grpc.close()
