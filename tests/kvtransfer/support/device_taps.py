"""Lets wires of bytes, which tests tamper with, stand in a link between devices.

    the link's announce, read ─▶ Top: reads the block's bytes, completes the checksum ─▶ the test's wire
        ─▶ Bottom: bytes into a block of its own, announced with the piece's place ─▶ the device's wire

So whatever a test makes of a piece or its bytes is gathered, copied and announced by the real thing.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.device.streams.stream import Event, HostStream
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.link.interfaces import Connector, SenderWire
from kvtransfer.protocol.checksum import multipliers
from kvtransfer.protocol.frames import Piece, SenderControl
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from kvtransfer.transports.nccl.sender_wire import NcclSenderWire
from tests.kvtransfer.support.device_rigs import DeviceRig
from tests.kvtransfer.support.wrapped import WrappedConnector, WrappedWire

_MASK = (1 << 64) - 1
_LINKS = 64


def words_sum(data: bytes) -> int:
    """The summand of a piece's bytes in its place's checksum."""
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
        self._reads: deque[Event] = deque()

    @property
    def reading(self) -> bool:
        """True if the device may read what was put."""
        while self._reads and self._reads[0].query():
            self._reads.popleft()
        return bool(self._reads)

    def put(self, piece: Piece, payload: memoryview) -> None:
        data = bytes(payload)
        index = self._first + min(piece.staging, self._pieces - 1)
        if piece.staging < self._pieces:
            self._scratch[index, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        begins = (piece.checksum - words_sum(data)) & _MASK
        gathered = Piece(piece.transfer, self._group, 0, 0, len(data), piece.staging, begins)
        self.wire.announce(piece)
        if (event := self.wire.read(gathered, (index,), None)) is not None:
            self._reads.append(event)


class Top(WrappedWire):
    """`announce` and `read`, onto a wire of bytes."""

    on_device = True

    def __init__(self, wire: SenderWire, bottom: Bottom, groups: Sequence[NDArray[np.uint8]]) -> None:
        super().__init__(wire)
        self._bottom = bottom
        self._groups = groups
        # Frames between an announcement and its read: the wire below announces when it reads.
        self._follow: list[SenderControl] | None = None

    def send(self, frame: SenderControl) -> None:
        if self._follow is None:
            super().send(frame)
        else:
            self._follow.append(frame)

    def announce(self, piece: Piece) -> None:
        self._follow = []

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are put by their numbers")

    def read(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event:
        assert after is None
        group, begins = self._groups[piece.group], piece.offset
        data = b"".join(group[block, begins : begins + piece.length].tobytes() for block in blocks)
        whole = (piece.checksum + words_sum(data)) & _MASK
        announced = Piece(
            piece.transfer, piece.group, piece.ordinal, piece.offset, piece.length, piece.staging, whole
        )
        self._wire.put(announced, memoryview(data))
        follow, self._follow = self._follow or [], None
        for frame in follow:
            super().send(frame)
        return HostStream().record_event()

    def keep_warm(self, *, reading: bool) -> None:
        self._bottom.wire.keep_warm(reading=self._bottom.reading)

    def busy_poll(self) -> bool:
        return self._bottom.reading or self._bottom.wire.busy_poll()


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
        # The state of the link that this thread opens.
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
