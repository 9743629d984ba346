"""A sender's side of an open link: the wire, and the receiver's staging as credits.

A credit is a staging index that the sender may write. It is spent with a piece and returned in a CREDIT
frame, whatever has become of the transfer meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import cast

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.stream import Event
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.link.interfaces import DeviceSenderWire, SenderWire
from kvtransfer.protocol.checksum import PieceChecksum, place_sum
from kvtransfer.protocol.frames import Credit, Piece
from kvtransfer.protocol.piece_geometry import PieceGeometry, max_pieces_per_transfer
from kvtransfer.sender.transfer import BlockSource, PieceSource, Transfer


class CreditWindow:
    """The credits of one link, free and spent, and how blocks are cut into pieces over it."""

    def __init__(self, response: OpenLinkResponse, wire: SenderWire, block_bytes: tuple[int, ...]) -> None:
        """BatonError(INVALID) for a window that is too small."""
        if response.window_pieces < 2 or response.piece_bytes < 1:
            raise BatonError(ErrorKind.INVALID, "the receiver offers a window that is too small")
        self.wire = wire
        self.pieces = response.window_pieces
        self.max_per_transfer = max_pieces_per_transfer(
            response.window_pieces, between_devices=wire.on_device
        )
        self.credits = deque(range(response.window_pieces))
        self.in_flight: dict[int, Transfer] = {}
        self._geometry = PieceGeometry.of(block_bytes, response.piece_bytes, multi_block=wire.on_device)
        self._device_wire = cast(DeviceSenderWire, wire) if wire.on_device else None
        self._checksum = PieceChecksum(min(response.piece_bytes, max(block_bytes)))
        self._announced: tuple[Transfer, PieceSource, Piece] | None = None
        # Pieces that a device reads, with the event of each read; None where the device failed.
        self._reading: deque[tuple[Transfer, PieceSource, Event | None]] = deque()

    def put(self, transfer: Transfer, source: BlockSource) -> None:
        """Reads or announces the transfer's next piece, and spends a credit; `gather` must follow."""
        if self._device_wire is not None:
            self._announce(self._device_wire, transfer)
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

    def _announce(self, wire: DeviceSenderWire, transfer: Transfer) -> None:
        """The device adds the checksum of the piece's words to that of its place."""
        group = transfer.next_group()
        part = transfer.next_piece(self._geometry, self._max_blocks_of_next(transfer, group))
        staging = self._spend(transfer)
        place = place_sum(transfer.transfer_id, group, part.ordinal, part.offset, part.length)
        piece = _piece(transfer, part, staging, place)
        self._announced = transfer, part, piece
        wire.announce(piece)
        transfer.shipped(part)

    def may_put(self, transfer: Transfer) -> bool:
        """True if there is a credit for the transfer's next piece, and its bytes can be read now, or by a
        device that waits for them itself."""
        if not self.credits or transfer.pieces_in_flight >= self.max_per_transfer:
            return False
        return self._device_wire is not None or transfer.is_final()

    def keep_warm(self) -> None:
        """Keeps the device from going idle before a transfer."""
        if self._device_wire is not None:
            self._device_wire.keep_warm(reading=bool(self._reading))

    def gather(self) -> None:
        """Enqueues the device's read of the announced piece."""
        if self._device_wire is not None and self._announced is not None:
            transfer, part, piece = self._announced
            self._announced = None
            self._reading.append((transfer, part, self._device_wire.read(piece, part.blocks, part.after)))

    def _max_blocks_of_next(self, transfer: Transfer, group: int) -> int:
        """Bounds the blocks of the next piece. The kernels before a transfer's first copy and after its last
        one overlap with no other copy: so a piece is smaller when nothing is in flight, and a quarter of a
        full piece is left for the end."""
        most = self._geometry.max_blocks_per_piece(group)
        quarter = most // 4
        if not self.in_flight:
            most -= quarter
        return max(1, quarter, min(most, transfer.queued_blocks - quarter))

    def _spend(self, transfer: Transfer) -> int:
        staging = self.credits.popleft()
        self.in_flight[staging] = transfer
        transfer.pieces_in_flight += 1
        return staging

    def collect_reads(self) -> None:
        """Unpins what a device has read meanwhile."""
        while self._reading and (event := self._reading[0][2]) is not None and event.query():
            transfer, part, _ = self._reading.popleft()
            transfer.read_done(part)

    def close(self) -> None:
        """Breaks the wire; afterwards no block is read any more."""
        self.wire.close()
        for transfer, part, _ in self._reading:
            transfer.read_done(part)
        self._reading.clear()

    def busy_poll(self) -> bool:
        """True while device reads are pending; they complete without waking the loop."""
        return bool(self._reading) or (self._device_wire is not None and self._device_wire.busy_poll())

    def return_credits(self, frame: Credit) -> None:
        """Takes credits back. Raises BatonError(INVALID) for one that was not spent."""
        for index in frame.indices:
            transfer = self.in_flight.pop(index, None)
            if transfer is None:
                raise BatonError(
                    ErrorKind.INVALID, f"the receiver returned staging index {index}, which was not in use"
                )
            transfer.pieces_in_flight -= 1
            self.credits.append(index)


def _piece(transfer: Transfer, part: PieceSource, staging: int, checksum: int) -> Piece:
    return Piece(transfer.transfer_id, part.group, part.ordinal, part.offset, part.length, staging, checksum)
