"""The sender's side of an nccl link; `endpoint` describes the protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.device.nccl.nccl_channel import NcclChannel
from baton.device.streams.stream import Event
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.device.blocks import LinkBlocks
from kvtransfer.device.movers import gatherer
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.protocol.frames import (
    FrameError,
    Piece,
    ReceiverFrame,
    SenderControl,
    decode_from_receiver,
    encode,
    encode_piece_header,
)
from kvtransfer.transports.grpc.connector import GrpcSenderWire
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.nccl.frame_socket import FrameSocket

_LOG = logging.getLogger(__name__)

# How long the frame socket's end waits for the reason, which the receiver sends over the slower keepalive.
_REASON_TIMEOUT_S = 0.25


class NcclSenderWire:
    """A `DeviceSenderWire`. Owned by the loop once made."""

    on_device = True
    shares_clock = False

    def __init__(
        self,
        nccl: NcclEndpoint,
        channel: NcclChannel,
        staging: PieceMemory,
        keepalive: GrpcSenderWire,
        frames: FrameSocket,
        response: OpenLinkResponse,
        blocks: LinkBlocks,
    ) -> None:
        """OSError, RuntimeError where the device fails."""
        pieces = response.window_pieces
        self._nccl = nccl
        self._channel = channel
        self._staging = staging
        self.keepalive = keepalive
        self.frames = frames
        self._pieces = pieces
        self._mover = gatherer(blocks, pieces, response.piece_bytes, staging, staging)
        self._stream = blocks.device.stream(high_priority=True)
        self._closed = False
        self._malformed: FrameError | None = None
        self._failed_at: float | None = None
        nccl.watch(channel, keepalive.failure)

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are sent by `announce` and `read`")

    def announce(self, piece: Piece) -> None:
        self.frames.add(encode_piece_header(piece))  # first, so that the receive is posted in time

    def read(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event | None:
        if self._closed:
            return None
        try:
            return self._gather(piece, blocks, after)
        except RuntimeError as error:
            self._channel.abort(f"the device failed: {error}")
            return None

    def _gather(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event:
        if after is not None:
            self._stream.wait_event(after)
        if piece.staging >= self._pieces:  # the receiver reports an index outside the window
            return self._stream.record_event()
        self._mover.move(self._stream, self._mover.prepare(piece, blocks, piece.checksum))
        gathered = self._stream.record_event()
        size = self._staging.head + piece.length
        self._channel.send(self._staging.address_of(piece.staging), size, gathered)
        return gathered

    def send(self, frame: SenderControl) -> None:
        """Sends a frame after what was announced, whose bytes may come later."""
        self.frames.add(encode(frame))

    def receive(self) -> ReceiverFrame | None:
        if self._malformed is not None:
            return None
        try:
            message = self.frames.take()
            return None if message is None else decode_from_receiver(message)
        except FrameError as malformed:
            self._malformed = malformed
            return None

    def failure(self) -> BatonError | None:
        if (error := self._malformed or self.keepalive.failure()) is not None:
            return error
        if (why := self._channel.failure) is not None:
            return BatonError(ErrorKind.UNAVAILABLE, why)
        if (error := self.frames.failure()) is None:
            return None
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        return error if now > self._failed_at + _REASON_TIMEOUT_S else None

    def keep_warm(self, *, reading: bool) -> None:
        """Does nothing: the device has just computed the blocks, and kernels read them."""

    def busy_poll(self) -> bool:
        return self.frames.busy_poll()

    def close(self) -> None:
        """Blocks until the device reads no block any more; the staging is freed once the channel has
        terminated."""
        if self._closed:
            return
        self._closed = True
        try:
            self._stream.synchronize()
        except RuntimeError:
            _LOG.exception("link_device_failed")
        self.frames.close()
        self.keepalive.close()
        self._nccl.abort(self._channel, "the sender closed the link", self._staging.free)
