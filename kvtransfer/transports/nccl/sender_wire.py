"""The sender's side of the nccl transport; the whole of it is drawn in `nccl_links`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from baton.device.nccl_channel import NcclChannel
from baton.device.stream import Event
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.kernels.move_plan import Act
from kvtransfer.device.mover import RowMover
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.device.reads import BlockReads
from kvtransfer.protocol.frames import (
    FrameError,
    Piece,
    ReceiverFrame,
    Words,
    decode_from_receiver,
    encode,
    encode_piece_header,
)
from kvtransfer.transports.grpc.connector import GrpcSenderWire
from kvtransfer.transports.nccl.endpoint import NcclLinks
from kvtransfer.transports.nccl.frame_socket import FrameSocket

_LOG = logging.getLogger(__name__)

_LAST_WORD_S = 0.25


class NcclSenderWire:
    """One link at the sender: a `GatheringWire`. Owned by the loop once made."""

    def __init__(
        self,
        links: NcclLinks,
        channel: NcclChannel,
        staging: PieceMemory,
        lifeline: GrpcSenderWire,
        frames: FrameSocket,
        response: OpenLinkResponse,
        blocks: DeviceBlocks,
    ) -> None:
        """OSError, RuntimeError where the device refuses."""
        pieces = response.window_pieces
        self._links = links
        self._channel = channel
        self._staging = staging
        self._lifeline = lifeline
        self._frames = frames
        self._pieces = pieces
        self._mover = RowMover(
            blocks, pieces, response.piece_bytes, Act.GATHER, sums=staging, staging=staging
        )
        self._gathering = blocks.device.stream(high_priority=True)
        self._reads = BlockReads()
        self._put: deque[tuple[Piece, Sequence[int], Event | None]] = deque()
        self._closed = False
        self._malformed: FrameError | None = None
        self._broken_at: float | None = None
        links.watch(channel, lifeline.broken)

    @property
    def gathers(self) -> bool:
        return True

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are put by their numbers")

    def put_blocks(self, piece: Piece, blocks: Sequence[int], after: Event | None = None) -> None:
        if self._closed:
            return
        self._frames.add(self.header(piece))  # first: the other end's receive is to be there in time
        self._put.append((piece, blocks, after))

    def gather(self) -> None:
        while self._put:
            piece, blocks, after = self._put.popleft()
            self._reads.put()
            try:
                if after is not None:
                    self._gathering.wait_event(after)
                if piece.staging < self._pieces:  # what the window does not have is written nowhere
                    self._gather(piece, blocks)
                else:
                    self._reads.read_by(self._gathering.record_event())
            except RuntimeError as error:  # CUDA's, torch's
                self._channel.abort(f"the device refuses: {error}")

    def _gather(self, piece: Piece, blocks: Sequence[int]) -> None:
        prepared = self._mover.prepare(piece, blocks, piece.checksum)
        self._mover.move(self._gathering, prepared)
        there = self._gathering.record_event()
        self._reads.read_by(there)
        self._channel.send(self._staging.address(piece.staging), self._staging.head + piece.length, there)

    def header(self, piece: Piece) -> bytes:
        """What announces a piece."""
        return encode_piece_header(piece)

    def tell(self, frame: Words) -> None:
        """Behind what was announced, whose bytes may come later."""
        self._frames.add(encode(frame))

    def hear(self) -> ReceiverFrame | None:
        if self._malformed is not None:
            return None
        try:
            message = self._frames.take()
            return None if message is None else decode_from_receiver(message)
        except FrameError as malformed:
            self._malformed = malformed
            return None

    def broken(self) -> BatonError | None:
        if (error := self._malformed or self._lifeline.broken()) is not None:
            return error
        if (why := self._channel.failure) is not None:
            return BatonError(ErrorKind.UNAVAILABLE, why)
        if (error := self._frames.broken()) is None:
            return None
        # The receiver says why over the lifeline, which is slower.
        now = time.monotonic()
        self._broken_at = self._broken_at or now
        return error if now > self._broken_at + _LAST_WORD_S else None

    def keep_awake(self) -> None:
        """Nothing need be done: who has blocks to send has just computed them, and kernels read them."""

    def restless(self) -> bool:
        return self._reads.under_way or self._frames.restless()

    def gathered(self) -> int:
        return self._reads.count()

    def close(self) -> None:
        """Waits until the device reads no block any more; the staging is freed when the line is over."""
        if self._closed:
            return
        self._closed = True
        try:
            self._gathering.synchronize()
        except RuntimeError:
            _LOG.exception("link_device_failed")
        self._reads.end()
        self._frames.close()
        self._lifeline.close()
        self._links.end(self._channel, "the sender closed the link", self._staging.free)
