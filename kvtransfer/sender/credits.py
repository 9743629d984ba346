"""What a sender has of an open link: the wire, and the receiver's staging as credits.

A credit is a staging index that is ours to write. It is spent with a piece and comes home in a CREDIT
frame, whatever became of the transfer meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import cast

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.link.interfaces import GatheringWire, SenderWire
from kvtransfer.protocol.checksum import PieceChecksum, place_sum
from kvtransfer.protocol.frames import Credit, Piece
from kvtransfer.protocol.piece_geometry import Geometry, share_of
from kvtransfer.sender.transfer import BlockSource, PieceSource, Transfer


class SendingWindow:
    """Credits at home and away, and how blocks are cut into pieces."""

    def __init__(self, response: OpenLinkResponse, wire: SenderWire, block_bytes: tuple[int, ...]) -> None:
        """`BatonError` INVALID for a window without room."""
        if response.window_pieces < 2 or response.piece_bytes < 1:
            raise BatonError(ErrorKind.INVALID, "the receiver offers a window without room")
        self.wire = wire
        self.pieces = response.window_pieces
        self.share = share_of(response.window_pieces, between_devices=wire.gathers)
        self.credits = deque(range(response.window_pieces))
        self.in_flight: dict[int, Transfer] = {}
        self._geometry = Geometry.of(block_bytes, response.piece_bytes, spans=wire.gathers)
        # A wire that gathers adds a piece's words to its place's checksum, on the device.
        self._gathering = cast(GatheringWire, wire) if wire.gathers else None
        self._checksum = PieceChecksum(min(response.piece_bytes, max(block_bytes)))
        self._reading: deque[tuple[Transfer, PieceSource]] = deque()
        self._gathered = 0

    def put(self, transfer: Transfer, source: BlockSource) -> None:
        """Reads the transfer's next piece, or announces it, and spends a credit on it; `gather` follows."""
        if self._gathering is not None:
            self._put_blocks(self._gathering, transfer)
            return
        part = transfer.next_piece(self._geometry)
        staging = self._spend(transfer)
        data = source.read(part.group, part.pushed[0].block, part.offset, part.length)
        if data.nbytes != part.length:
            raise ValueError(f"the source gave {data.nbytes} bytes for a piece of {part.length}")
        checksum = self._checksum.of(data, transfer.transfer_id, part.group, part.ordinal, part.offset)
        self.wire.put(_piece(transfer, part, staging, checksum), data)
        transfer.shipped(part)
        transfer.read_done(part)

    def _put_blocks(self, wire: GatheringWire, transfer: Transfer) -> None:
        group = transfer.next_group()
        part = transfer.next_piece(self._geometry, self._blocks_of_next(transfer, group))
        staging = self._spend(transfer)
        place = place_sum(transfer.transfer_id, group, part.ordinal, part.offset, part.length)
        self._reading.append((transfer, part))
        wire.put_blocks(_piece(transfer, part, staging, place), part.blocks, part.after)
        transfer.shipped(part)

    def may_put(self, transfer: Transfer) -> bool:
        """Whether there is a credit for its next piece, and its bytes can be read, or will be by a device
        that waits for them itself."""
        if not self.credits or transfer.held >= self.share:
            return False
        return self._gathering is not None or transfer.is_final()

    def keep_awake(self) -> None:
        """A transfer is to be sent soon."""
        if self._gathering is not None:
            self._gathering.keep_awake()

    def gather(self) -> None:
        """A device reads what was only announced, when what goes right behind it has been said."""
        if self._gathering is not None:
            self._gathering.gather()

    def _blocks_of_next(self, transfer: Transfer, group: int) -> int:
        """At most. What kernels do before the first piece's copy and after the last one's hides behind none:
        so with nothing on the wire before it a piece is smaller, and a quarter of one is left for the end."""
        most = self._geometry.blocks_per_piece(group)
        quarter = most // 4
        if not self.in_flight:
            most -= quarter
        return max(1, quarter, min(most, transfer.queued_blocks - quarter))

    def _spend(self, transfer: Transfer) -> int:
        staging = self.credits.popleft()
        self.in_flight[staging] = transfer
        transfer.held += 1
        return staging

    def take_read(self) -> None:
        """What a device has read meanwhile is unpinned."""
        if self._gathering is None:
            return
        gathered = self._gathering.gathered()
        for _ in range(gathered - self._gathered):
            transfer, part = self._reading.popleft()
            transfer.read_done(part)
        self._gathered = gathered

    def close(self) -> None:
        """Breaks the wire; nothing is read any more."""
        self.wire.close()
        self.take_read()

    def restless(self) -> bool:
        """Whether a device is at work, whose end wakes nobody."""
        return self._gathering is not None and self._gathering.restless()

    def come_home(self, frame: Credit) -> None:
        """Raises `BatonError` INVALID for a credit that was not away."""
        for index in frame.indices:
            transfer = self.in_flight.pop(index, None)
            if transfer is None:
                raise BatonError(ErrorKind.INVALID, f"the receiver returned staging index {index} unasked")
            transfer.held -= 1
            self.credits.append(index)


def _piece(transfer: Transfer, part: PieceSource, staging: int, checksum: int) -> Piece:
    return Piece(transfer.transfer_id, part.group, part.ordinal, part.offset, part.length, staging, checksum)
