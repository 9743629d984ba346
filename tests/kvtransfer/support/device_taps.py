"""Lets wires of bytes, which tests tamper with, stand in a link between devices.

    the link's put_blocks ─▶ Top: reads the block's bytes, completes the checksum ─▶ the test's wire
        ─▶ Bottom: bytes into a block of its own, announced as the piece says ─▶ the device's wire

So whatever a test makes of a piece or its bytes is gathered, copied and announced by the real thing.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.device.stream import Event
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.link.interfaces import Connector, SenderWire
from kvtransfer.protocol.checksum import multipliers
from kvtransfer.protocol.frames import Piece, encode_piece_header
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from kvtransfer.transports.nccl.sender_wire import NcclSenderWire
from tests.kvtransfer.support.device_rigs import DeviceRig
from tests.kvtransfer.support.wrapped import WrappedConnector, WrappedWire

_MASK = (1 << 64) - 1
_LINKS = 64


def words_sum(data: bytes) -> int:
    """What a piece's bytes add to its place's checksum."""
    words = np.frombuffer(data, dtype="<u4").astype(np.uint64)
    return int((words * multipliers(len(words))).sum(dtype=np.uint64)) & _MASK


class Bottom(WrappedWire):
    """`put` with bytes, onto a wire between devices."""

    on_device = False

    def __init__(
        self,
        wire: IpcDeviceSenderWire | NcclSenderWire,
        scratch: NDArray[np.uint8],
        first: int,
        pieces: int,
        group: int,
    ) -> None:
        super().__init__(wire)
        self.wire = wire
        self._scratch = scratch
        self._first, self._pieces = first, pieces
        self._group = group

    def put(self, piece: Piece, payload: memoryview) -> None:
        data = bytes(payload)
        index = self._first + min(piece.staging, self._pieces - 1)
        if piece.staging < self._pieces:
            self._scratch[index, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        begins = (piece.checksum - words_sum(data)) & _MASK
        gathered = Piece(piece.transfer, self._group, 0, 0, len(data), piece.staging, begins)
        self._put(piece, gathered, index)
        self.wire.gather()

    def _put(self, announced: Piece, gathered: Piece, index: int) -> None:
        """As `put_blocks`, of a piece that is announced as another."""
        if self.wire._closed:
            return
        if isinstance(self.wire, IpcDeviceSenderWire):
            self.wire._add(encode_piece_header(announced))
            self.wire._gather.reads.put(gathered, (index,), None)
        else:
            self.wire._frames.add(encode_piece_header(announced))
            self.wire._reads.put(gathered, (index,), None)


class Top(WrappedWire):
    """`put_blocks`, onto a wire of bytes."""

    on_device = True

    def __init__(self, wire: SenderWire, bottom: Bottom, groups: Sequence[NDArray[np.uint8]]) -> None:
        super().__init__(wire)
        self._bottom = bottom
        self._groups = groups
        self._read = 0

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are put by their numbers")

    def put_blocks(self, piece: Piece, blocks: Sequence[int], after: Event | None = None) -> None:
        assert after is None
        group, begins = self._groups[piece.group], piece.offset
        data = b"".join(group[block, begins : begins + piece.length].tobytes() for block in blocks)
        whole = (piece.checksum + words_sum(data)) & _MASK
        said = Piece(
            piece.transfer, piece.group, piece.ordinal, piece.offset, piece.length, piece.staging, whole
        )
        self._read += 1
        self._wire.put(said, memoryview(data))

    def gather(self) -> None:
        """The bytes were read."""

    def keep_warm(self) -> None:
        self._bottom.wire.keep_warm()

    def busy_poll(self) -> bool:
        return self._bottom.wire.busy_poll()

    def gathered_count(self) -> int:
        self._bottom.wire.gathered_count()
        return self._read


class Taps:
    """Both ends of the tap around a test's connector: `top(tampering(bottom(plain)))`."""

    def __init__(
        self, groups: Sequence[NDArray[np.uint8]], pieces: int, piece_bytes: int, rig: DeviceRig
    ) -> None:
        self._groups = groups
        self._pieces = pieces
        # A region for each link, round and round.
        self.scratch = rig.array((_LINKS * pieces, -(-piece_bytes // 16) * 16), np.uint8)
        self._links = itertools.count()
        # The sender's, with the taps' own as last group.
        self.blocks = DeviceBlocks(rig.sender, [rig.tensor(a, rig.sender) for a in (*groups, self.scratch)])
        # Of the link that this thread opens.
        self._opening = threading.local()

    def bottom(self, plain: Connector) -> WrappedConnector:
        return WrappedConnector(plain, self.lower)

    def top(self, tampering: Connector) -> WrappedConnector:
        return WrappedConnector(tampering, self.upper)

    def lower(self, wire: SenderWire) -> SenderWire:
        self._opening.bottom = None
        if not isinstance(wire, IpcDeviceSenderWire | NcclSenderWire):
            return wire
        first = next(self._links) % _LINKS * self._pieces
        bottom = Bottom(wire, self.scratch, first, self._pieces, len(self._groups))
        self._opening.bottom = bottom
        return bottom

    def upper(self, wire: SenderWire) -> SenderWire:
        bottom: Bottom | None = self._opening.bottom
        return wire if bottom is None else Top(wire, bottom, self._groups)
