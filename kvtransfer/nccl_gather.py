"""The sender's end of an nccl link between devices: blocks into staging, which a line sends from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

from baton.device.link_device import Memory, Moment
from baton.device.nccl_line import Job, NcclLine, Way
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.block_reads import BlockReads
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.frames import Piece, Summed, Words, encode, encode_piece_header
from kvtransfer.grpc_connector import GrpcSenderWire
from kvtransfer.move_plan import Act
from kvtransfer.nccl_links import NcclLinks, Place
from kvtransfer.nccl_sender import NcclSenderWire
from kvtransfer.row_mover import RowMover, sums_of

_LOG = logging.getLogger(__name__)
_MASK = (1 << 64) - 1


class NcclGather:
    """Blocks into staging, checksums to the host. Owned by the loop once made. OSError where the device
    refuses."""

    def __init__(self, blocks: DeviceBlocks, staging: Memory, response: OpenLinkResponse) -> None:
        device, pieces = blocks.device, response.window_pieces
        self._sums = sums_of(device, pieces)
        self._mover = RowMover(
            blocks, pieces, response.piece_bytes, Act.GATHER, sums=self._sums, staging=staging.tensor
        )
        self._line = device.line()
        self._reads = BlockReads()

    def gather(self, piece: Piece, blocks: Sequence[int]) -> Moment:
        """When the piece is in staging and the sum of its words is here."""
        self._reads.put()
        self._mover.move(self._line, self._mover.prepare(self._line, piece, blocks))
        there = self._line.moment()
        self._reads.read_by(there)
        return there

    def skip(self) -> None:
        """A piece that the window has no place for is written nowhere."""
        self._reads.put()
        self._reads.read_by(self._line.moment())

    def checksum(self, piece: Piece) -> int:
        """Of a piece that is in staging."""
        return piece.checksum + self._sums.of(piece.staging) & _MASK

    def gathered(self) -> int:
        """How many pieces have been read out of their blocks since the beginning; all, once closed."""
        return self._reads.count()

    def close(self) -> None:
        """Waits until the device reads no block any more. RuntimeError where that cannot be said: then it
        does not."""
        try:
            self._line.finish()
        finally:
            self._reads.end()


class NcclDeviceWire(NcclSenderWire):
    """A `GatheringWire`."""

    def __init__(
        self,
        links: NcclLinks,
        line: NcclLine,
        place: Place,
        control: GrpcSenderWire,
        response: OpenLinkResponse,
        wake: Callable[[], None],
        blocks: DeviceBlocks,
    ) -> None:
        """OSError where the device refuses."""
        super().__init__(links, line, place, control, response, wake)
        self._gather = NcclGather(blocks, cast(Memory, place.window), response)

    @property
    def gathers(self) -> bool:
        return True

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are put by their numbers")

    def put_blocks(self, piece: Piece, blocks: Sequence[int]) -> None:
        if self._closed:
            return
        self._control.announce(self.header(piece))  # first: the other end's receive is to be there in time
        if piece.staging >= self._pieces:
            self._gather.skip()
            return
        try:
            there = self._gather.gather(piece, blocks)
        except RuntimeError as error:  # CUDA's, torch's
            self._line.abort(f"the device refuses: {error}")
            return
        address = self._place.address + piece.staging * self._piece_bytes
        self._line.add(Job(Way.OUT, address, piece.length, there, issued=lambda: self._say_sum(piece)))

    def tell(self, frame: Words) -> None:
        """Behind what was announced, whose bytes may come later."""
        self._control.tell(frame)

    def restless(self) -> bool:
        """Threads carry it: a loop that never waits would keep Python's lock from them."""
        return False

    def gathered(self) -> int:
        return self._gather.gathered()

    def header(self, piece: Piece) -> bytes:
        """What announces a piece."""
        return encode_piece_header(piece)

    def close(self) -> None:
        if self._closed:
            return
        try:
            self._gather.close()  # it writes what is freed when the line is over
        except RuntimeError:
            _LOG.exception("the device of a link has failed")
        super().close()

    def _say_sum(self, piece: Piece) -> None:
        """When its blocks have been read."""
        self._control.announce(encode(Summed(piece.staging, self._gather.checksum(piece))))
        self._wake()
