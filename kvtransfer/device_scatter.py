"""The receiver's half of a link between devices: out of the window into blocks, summed on the way.

    begin: a kernel for a piece ─▶ ended: which were moved, and whether their sums are right

A piece that turns out wrong has been written by then, into blocks which its ticket reserved and no slot has
seen (`kvtransfer.moving`). So only a piece whose place is expected comes here, and whoever takes the blocks
away waits (`finish`) first.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.device.link_device import Memory, Moment
from kvtransfer.checksum import place_sum
from kvtransfer.device_blocks import DeviceSink
from kvtransfer.frames import Piece
from kvtransfer.move_plan import Travels
from kvtransfer.row_mover import RowMover

_MASK = (1 << 64) - 1


class Moving(NamedTuple):
    """A piece on its way into its blocks, of which so many are whole with it."""

    piece: Piece
    whole_blocks: int
    end: Moment


class DeviceScatter:
    """Owned by the loop."""

    def __init__(self, sink: DeviceSink, window: Memory) -> None:
        device = sink.blocks.device
        pieces, piece_bytes = sink.window_pieces, sink.piece_bytes
        self._sink = sink
        self._window = window
        self._mover = RowMover(sink.blocks, window.tensor, pieces, piece_bytes, Travels.SOURCE)
        self._found = device.on_host(pieces, 1)
        self._found_view, self._found_at = self._found.numpy(), self._found.data_ptr()
        self._line = device.line()
        self._moving: deque[Moving] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._moving)

    def begin(self, piece: Piece, blocks: int, whole_blocks: int) -> None:
        """Of so many blocks, whose places are expected, and no other piece has them."""
        transfer, group, ordinal = piece.transfer, piece.group, piece.ordinal
        places = [self._sink.place(transfer, group, ordinal + n) for n in range(blocks)]
        begins = place_sum(transfer, group, ordinal, piece.offset, piece.length)
        found = self._mover.move(self._line, piece, places, begins)
        self._line.copy(self._found_at + 8 * piece.staging, found, 8)
        self._moving.append(Moving(piece, whole_blocks, self._line.moment()))

    def ended(self) -> list[tuple[Moving, bool]]:
        """What has been moved since the last call, in its order, and whether each is what was sent."""
        done: list[tuple[Moving, bool]] = []
        while self._moving and self._moving[0].end.ended():
            moved = self._moving.popleft()
            found = int(self._found_view[moved.piece.staging, 0]) & _MASK
            done.append((moved, found == moved.piece.checksum))
        return done

    def finish(self) -> None:
        """Waits until all has been moved."""
        self._line.finish()

    def release(self) -> None:
        """The link is fenced, and nothing is under way: the window goes back to the device."""
        self._window.free()
