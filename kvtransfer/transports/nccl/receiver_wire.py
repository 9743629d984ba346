"""The receiver's side of an nccl link; `endpoint` describes the protocol."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from baton.base.errors import BatonError, ErrorKind
from baton.device.nccl.nccl_channel import NcclChannel
from baton.device.streams.stream import Event
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.frame_queue import CONTROL_FRAMES
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.frames import FrameError, Piece, ReceiverFrame, SenderFrame, decode_headers, encode
from kvtransfer.transports.grpc.listener import GrpcReceiverWire
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.nccl.frame_socket import FrameSocket

# How long announced pieces may take to arrive after a break.
_IN_FLIGHT_S = 0.1


class NcclReceiverWire:
    """A `DeviceReceiverWire`. Owned by the loop."""

    def __init__(
        self,
        nccl: NcclEndpoint,
        channel: NcclChannel,
        window: PieceMemory,
        staging: Staging,
        keepalive: GrpcReceiverWire,
        accepted: Future[socket.socket],
        wake: Callable[[], None],
    ) -> None:
        """`accepted`: the frame socket, once the sender has connected it."""
        self._nccl = nccl
        self._channel = channel
        self._window = window
        self._staging = staging
        self._keepalive = keepalive
        self._accepted = accepted
        self._wake = wake
        self._frames: FrameSocket | None = None
        self._bound = 2 * staging.pieces + CONTROL_FRAMES  # of frames that wait, in either direction
        self._closed = False
        self._malformed: BatonError | None = None
        self._failed_at: float | None = None
        self._received: deque[SenderFrame] = deque()
        # Receives that have not completed, in their order, and how many have.
        self._receives: deque[Event] = deque()
        self._arrived = 0
        # By staging index, of its current piece; None where the channel failed before.
        self._arrivals: dict[int, Event | None] = {}
        nccl.watch(channel, keepalive.failure)

    def receive(self) -> SenderFrame | None:
        if not self._received and self._malformed is None and not self._closed and self.attached():
            self._take()
        return self._received.popleft() if self._received else None

    def _take(self) -> None:
        """Takes all frames that have come: receives must be posted before their bytes come, whatever else
        there is to do."""
        assert self._frames is not None, "attached once there is a frame socket"
        try:
            while len(self._received) < self._bound and (message := self._frames.take()) is not None:
                for frame in decode_headers(message):
                    if isinstance(frame, Piece):
                        self._post_receive(frame)
                    self._received.append(frame)
        except FrameError as malformed:
            self._malformed = malformed

    def _post_receive(self, piece: Piece) -> None:
        """FrameError for an index that is not the sender's."""
        self._staging.take(piece)
        size = self._window.head + piece.length
        arrival = self._channel.receive(self._window.address_of(piece.staging), size)
        self._arrivals[piece.staging] = arrival
        if arrival is not None:
            self._receives.append(arrival)

    def arrived_count(self) -> int:
        # In this order: a receive that an abort ended did not complete, and the channel failed before.
        while self._receives and self._receives[0].query() and self._channel.connected:
            self._receives.popleft()
            self._arrived += 1
        return self._arrived

    def arrival_event(self, piece: Piece) -> Event | None:
        return self._arrivals[piece.staging]

    def checksum(self, piece: Piece) -> int:
        return self._window.sum_of(piece.staging)

    def send(self, frame: ReceiverFrame) -> None:
        if self._frames is not None:
            self._frames.add(encode(frame))

    def attached(self) -> bool:
        if self._frames is None and self._accepted.done():
            self._frames = FrameSocket(self._accepted.result(), self._bound, self._wake, "sender")
        return self._frames is not None and self._channel.connected and self._keepalive.attached()

    def busy_poll(self) -> bool:
        return bool(self._receives) or (self._frames is not None and self._frames.busy_poll())

    def failure(self) -> BatonError | None:
        error = self._malformed or self._keepalive.failure()
        if (why := self._channel.failure) is not None:
            return error or BatonError(ErrorKind.UNAVAILABLE, why)
        if error is None and self._frames is not None:
            error = self._frames.failure()
        if error is None or not self._receives:
            return error
        # What was announced before the break is in flight, unless the sender's device stopped too.
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        return error if now > self._failed_at + _IN_FLIGHT_S else None

    def fenced(self) -> bool:
        """Only receives posted here write the window: none is posted any more, and none runs."""
        return self._closed and self._keepalive.fenced() and self._channel.terminated

    def close(self, error: BatonError) -> None:
        if self._closed:
            return
        self._closed = True
        self._keepalive.close(error)
        if self._frames is not None:
            self._frames.close()
        elif not self._accepted.cancel():
            self._accepted.add_done_callback(lambda accepted: accepted.result().close())
        self._nccl.abort(self._channel, error.message)
