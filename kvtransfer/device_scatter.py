"""The receiver's half of a link between devices: out of the window into blocks, summed on the way.

    add ─▶ launch: one kernel a batch of pieces ─▶ ended: which were moved, and whether their sums are right

A piece that turns out wrong has been written by then, into a block which its ticket reserved and no slot has
seen (`kvtransfer.moving`). So only a piece whose place is expected comes here, and whoever takes the block
away waits (`finish`) first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.device.link_device import Memory, Moment
from kvtransfer.checksum import place_sum
from kvtransfer.device_blocks import DeviceSink
from kvtransfer.frames import Piece
from kvtransfer.moving import ROW_WORDS, WORD_BYTES, Travels, words_of
from kvtransfer.row_batches import Move, batches
from kvtransfer.row_mover import RowMover
from kvtransfer.row_table import RowTable

_BATCH_BYTES = 64 << 20
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Moving:
    """A batch that the device was told of."""

    batch: list[Move]
    end: Moment


class DeviceScatter:
    """Owned by the loop."""

    def __init__(self, sink: DeviceSink, window: Memory) -> None:
        device = sink.blocks.device
        pieces = sink.window_pieces
        self._sink = sink
        self._window = window
        window_words, aligned = words_of(window.tensor), sink.blocks.aligned(sink.piece_bytes)
        self._rows = RowTable(device, pieces)
        self._found = device.on_host(pieces, ROW_WORDS)
        self._found_view = self._found.numpy()
        self._piece_bytes = sink.piece_bytes
        self._block_words = sink.blocks.block_words
        self._movers = [
            RowMover(window_words, words, self._rows.there, Travels.SOURCE, aligned=aligned)
            for words in sink.blocks.words
        ]
        self._line = device.line()
        self._queue: list[Move] = []
        self._moving: deque[_Moving] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._moving or self._queue)

    def add(self, piece: Piece, whole: bool) -> None:
        """Its place is expected, and no other piece has it. `whole`: as `Move`'s."""
        self._queue.append(Move(piece, self._sink.place(piece.transfer, piece.group, piece.ordinal), whole))

    def launch(self) -> None:
        """Says to the device what was added."""
        queue, self._queue = self._queue, []
        for batch in batches(queue, self._piece_bytes, _BATCH_BYTES):
            self._launch(batch)

    def ended(self) -> list[tuple[Move, bool]]:
        """What has been moved since the last call, in its order, and whether each is what was sent."""
        done: list[tuple[Move, bool]] = []
        while self._moving and self._moving[0].end.ended():
            for move in self._moving.popleft().batch:
                piece = move.piece
                found = int(self._found_view[piece.staging, ROW_WORDS - 1]) & _MASK
                done.append((move, found == piece.checksum))
        return done

    def finish(self) -> None:
        """Waits until all that was added has been moved."""
        self.launch()
        self._line.finish()

    def release(self) -> None:
        """The link is fenced, and nothing is under way: the window goes back to the device."""
        self._movers.clear()
        self._window.free()

    def _launch(self, batch: list[Move]) -> None:
        first, count = batch[0].piece, len(batch)
        words, piece_words = self._block_words[first.group], self._piece_bytes // WORD_BYTES
        for n, (piece, block, _) in enumerate(batch):
            source, destination = piece.staging * piece_words, block * words + piece.offset // WORD_BYTES
            place = place_sum(piece.transfer, piece.group, piece.ordinal, piece.offset, piece.length)
            self._rows.fill(piece.staging, n, source, destination, piece.length // WORD_BYTES, place)
        self._rows.up(self._line, first.staging, count)
        longest = max(move.piece.length for move in batch) // WORD_BYTES
        self._movers[first.group].move(self._line, first.staging, count, longest)
        self._rows.down(self._line, first.staging, count, self._found.data_ptr())
        self._moving.append(_Moving(batch, self._line.moment()))
