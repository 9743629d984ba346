"""The receiver's side of the nccl transport; the whole of it is drawn in `nccl_links`."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from baton.device.link_device import LinkDevice
from baton.device.nccl_channel import NcclChannel
from baton.device.stream import Event
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.frame_queue import CONTROL_FRAMES
from kvtransfer.link.interfaces import OpenCall
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.addresses import NCCL_SCHEME
from kvtransfer.protocol.frames import FrameError, Piece, ReceiverFrame, SenderFrame, decode_announced, encode
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.listener import GrpcListener, GrpcOpenCall, GrpcReceiverWire
from kvtransfer.transports.nccl.endpoint import RECEIVER_RANK, TRANSPORT, NcclLinks
from kvtransfer.transports.nccl.frame_acceptor import FrameDoor
from kvtransfer.transports.nccl.frame_socket import FrameSocket

_ON_ITS_WAY_S = 0.1


class _Lifeline:
    """A `Landing` where nothing lands: the stream is there to be broken."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._closed: BatonError | None = None

    def accept(self, message: bytes) -> None:
        raise FrameError("frames of this link do not come over its stream")

    def take(self) -> None:
        return None

    def close(self, error: BatonError) -> None:
        if self._closed is None:
            self._closed = error
        self._wake()

    def closed(self) -> BatonError | None:
        return self._closed


class NcclReceiverWire:
    """One link at the receiver: a `LandingWire`. Owned by the loop."""

    def __init__(
        self,
        links: NcclLinks,
        channel: NcclChannel,
        window: PieceMemory,
        staging: Staging,
        lifeline: GrpcReceiverWire,
        brought: Future[socket.socket],
        wake: Callable[[], None],
    ) -> None:
        """`brought`: what comes through the door from who knows the secret, its frames' socket."""
        self._links = links
        self._channel = channel
        self._window = window
        self._staging = staging
        self._lifeline = lifeline
        self._brought = brought
        self._wake = wake
        self._frames: FrameSocket | None = None
        self._bound = 2 * staging.pieces + CONTROL_FRAMES  # of frames that wait, on either side
        self._closed = False
        self._broken: BatonError | None = None  # by what its sender said
        self._broken_at: float | None = None
        self._heard: deque[SenderFrame] = deque()
        # Receives that have not ended, in their order, as they do; how many have.
        self._landing: deque[Event] = deque()
        self._landed = 0
        # By staging index, of the piece that has it; nothing where the line broke before.
        self._there: dict[int, Event | None] = {}
        links.watch(channel, lifeline.broken)

    def hear(self) -> SenderFrame | None:
        if not self._heard and self._broken is None and not self._closed and self.attached():
            self._take()
        return self._heard.popleft() if self._heard else None

    def _take(self) -> None:
        assert self._frames is not None, "who is attached has brought it"
        try:
            # All that are there: receives are to be posted before their bytes come, whatever else is to do.
            while len(self._heard) < self._bound and (message := self._frames.take()) is not None:
                for frame in decode_announced(message):
                    if isinstance(frame, Piece):
                        self._receive(frame)
                    self._heard.append(frame)
        except FrameError as malformed:
            self._broken = malformed

    def _receive(self, piece: Piece) -> None:
        """`FrameError` for a place that is not the sender's."""
        self._staging.take(piece)
        there = self._channel.receive(self._window.address(piece.staging), self._window.head + piece.length)
        self._there[piece.staging] = there
        if there is not None:  # else the line is broken, and nothing lands any more
            self._landing.append(there)

    def landed(self) -> int:
        # Asked in this order: what an abort has ended is not there, and the line was broken before.
        while self._landing and self._landing[0].query() and self._channel.connected:
            self._landing.popleft()
            self._landed += 1
        return self._landed

    def arrival(self, piece: Piece) -> Event | None:
        return self._there[piece.staging]

    def checksum(self, piece: Piece) -> int:
        return self._window.sum_of(piece.staging)

    def tell(self, frame: ReceiverFrame) -> None:
        if self._frames is not None:
            self._frames.add(encode(frame))

    def attached(self) -> bool:
        if self._frames is None and self._brought.done():
            self._frames = FrameSocket(self._brought.result(), self._bound, self._wake, "sender")
        return self._frames is not None and self._channel.connected and self._lifeline.attached()

    def restless(self) -> bool:
        return bool(self._landing) or (self._frames is not None and self._frames.restless())

    def broken(self) -> BatonError | None:
        error = self._broken or self._lifeline.broken()
        if (why := self._channel.failure) is not None:
            return error or BatonError(ErrorKind.UNAVAILABLE, why)
        if error is None and self._frames is not None:
            error = self._frames.broken()
        if error is None or not self._landing:
            return error
        # What was announced before the break is on its way, unless its sender's device stopped with it.
        now = time.monotonic()
        self._broken_at = self._broken_at or now
        return error if now > self._broken_at + _ON_ITS_WAY_S else None

    def fenced(self) -> bool:
        """Nothing writes the window but our own receives: none is posted any more, and none runs."""
        return self._closed and self._lifeline.fenced() and self._channel.terminated

    def close(self, error: BatonError) -> None:
        if self._closed:
            return
        self._closed = True
        self._lifeline.close(error)
        if self._frames is not None:
            self._frames.close()
        elif not self._brought.cancel():
            self._brought.add_done_callback(lambda brought: brought.result().close())
        self._links.end(self._channel, error.message)


class _NcclCall:
    """A sender's request that came over grpc, and the line that its link will have."""

    def __init__(
        self,
        call: GrpcOpenCall,
        links: NcclLinks,
        door: FrameDoor,
        wake: Callable[[], None],
        auth: LinkAuth,
    ) -> None:
        self.request: OpenLinkRequest = call.request
        self._call = call
        self._links = links
        self._door = door
        self._wake = wake
        self._auth = auth
        self._window: PieceMemory | None = None

    @property
    def device(self) -> LinkDevice:
        return self._links.device

    def window(self, pieces: int, piece_bytes: int) -> PieceMemory:
        try:
            self._window = self._links.staging(pieces, piece_bytes)
        except (OSError, RuntimeError) as error:
            raise BatonError(ErrorKind.OVERLOADED, f"no memory for a link: {error}") from error
        return self._window

    def grant(self, response: OpenLinkResponse, staging: Staging) -> NcclReceiverWire:
        assert self._window is not None, "staging lies in the window of its call"
        response.nccl_id = self._links.unique_id()
        response.frames_port = self._door.port
        channel = self._links.channel(response.nccl_id, RECEIVER_RANK, self._wake)
        brought = self._door.expect(self._auth.frames_secret(response.nccl_id))
        lifeline = self._call.grant(response, staging, _Lifeline(self._wake))
        return NcclReceiverWire(self._links, channel, self._window, staging, lifeline, brought, self._wake)

    def refuse(self, error: BatonError) -> None:
        self._call.refuse(error)


class NcclListener:
    """A grpc listener of its own, for links and their lifelines; a door for frames."""

    transport = TRANSPORT

    def __init__(
        self,
        host: str,
        port: int,
        *,
        peer_timeout_s: float,
        max_links: int,
        wake: Callable[[], None],
        links: NcclLinks,
        auth: LinkAuth | None = None,
        frames_port: int = 0,
    ) -> None:
        """`frames_port`: where the links' frames come, 0: any free one. `BatonError` INVALID where it cannot
        bind."""
        self._auth = auth or LinkAuth()
        self._lifelines = GrpcListener(
            host,
            port,
            piece_bytes=0,
            peer_timeout_s=peer_timeout_s,
            max_links=max_links,
            wake=wake,
            auth=self._auth,
        )
        self._links = links
        self._wake = wake
        self.address = NCCL_SCHEME + self._lifelines.address
        try:
            self._door = FrameDoor(host, wake, frames_port)
        except BatonError:
            self._lifelines.close()
            raise

    def next_call(self) -> OpenCall | None:
        call = self._lifelines.next_call()
        return None if call is None else _NcclCall(call, self._links, self._door, self._wake, self._auth)

    def close(self) -> None:
        self._door.close()
        self._lifelines.close()
