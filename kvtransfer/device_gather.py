"""The sender's half of a link between devices: blocks into staging, staging into the receiver's window.

    blocks ──kernel, sums──▶ staging of ours      then: staging ──copy──▶ window
           (the gathering line)                         rows ─────copy──▶ rows of the link's memory
                                                        n ──────────────▶ the ring's tail
                                                  (the link's line, in this order)

Index n of staging is copied to index n of the window.

An index of staging is free when its credit is: the receiver had the bytes by then. Nothing waits here but
`close`.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

from baton.device.link_device import Moment
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.ipc_memory import ROWS, TO_RECEIVER, LinkMemory
from kvtransfer.moving import WORD_BYTES, Travels, words_of
from kvtransfer.row_batches import Move, batches
from kvtransfer.row_mover import RowMover
from kvtransfer.row_table import RowTable

# What one kernel gathers and one copy carries. The first ones, with nothing before them on the line, are
# smaller: the wire is to begin soon.
_BATCH_BYTES = 32 << 20
_FIRST_BYTES = 8 << 20


class DeviceGather:
    """Owned by the loop once made; making it may take milliseconds. OSError where the device refuses."""

    def __init__(
        self, blocks: DeviceBlocks, memory: LinkMemory, window_pieces: int, piece_bytes: int
    ) -> None:
        device = blocks.device
        self._blocks = blocks
        self._piece_bytes = piece_bytes
        self._pieces = window_pieces
        aligned = blocks.aligned(piece_bytes)
        with ExitStack() as undo:
            self._registered = device.register(memory.shared)
            undo.callback(self._registered.release)
            self._window = device.open(memory.handle)
            undo.callback(self._window.close)
            self._staging = device.allocate(window_pieces * piece_bytes)
            undo.callback(self._staging.free)
            self._rows = RowTable(device, window_pieces)
            self._gathering, self._wire = device.line(), device.line()
            self._let_go = undo.pop_all()
        staging_words = words_of(self._staging.tensor)
        self._movers = [
            RowMover(words, staging_words, self._rows.there, Travels.DESTINATION, aligned=aligned)
            for words in blocks.words
        ]
        self._queue: list[Move] = []
        # Batches whose blocks are being read, with their number of pieces.
        self._reading: deque[tuple[Moment, int]] = deque()
        self._gathered = 0

    def add(self, move: Move) -> bool:
        """Queues a piece whose checksum is its place's alone; True where enough is there to `launch`."""
        self._queue.append(move)
        enough = _BATCH_BYTES if self._reading else _FIRST_BYTES
        return len(self._queue) * self._piece_bytes >= enough

    def launch(self) -> list[list[Move]]:
        """Says to the device what is queued; the batches, which may be announced now (`publish`)."""
        if not self._queue:
            return []
        queue, self._queue = self._queue, []
        cut = batches(queue, self._piece_bytes, _BATCH_BYTES)
        for batch in cut:
            self._launch(batch)
        return cut

    def publish(self, position: int) -> None:
        """Moves the ring's tail, behind all that was launched."""
        self._wire.publish(self._registered.address + TO_RECEIVER, position)

    def gathered(self) -> int:
        """How many pieces have been read out of their blocks since the beginning."""
        while self._reading and self._reading[0][0].ended():
            self._gathered += self._reading.popleft()[1]
        return self._gathered

    def close(self) -> None:
        """Waits until the device has done all of it; from then on it cannot write the window. RuntimeError
        where that cannot be said: then nothing is read any more either."""
        try:
            self._gathering.finish()
            self._wire.finish()
            self._movers.clear()
            self._let_go.close()
        finally:
            self._gathered += sum(count for _, count in self._reading) + len(self._queue)
            self._reading.clear()
            self._queue.clear()

    def _launch(self, batch: list[Move]) -> None:
        first, last = batch[0].piece, batch[-1].piece
        begins, count = first.staging, len(batch)
        if begins >= self._pieces:  # what the window does not have is written nowhere
            self._reading.append((self._gathering.moment(), count))
            return
        words, piece_words = self._blocks.block_words[first.group], self._piece_bytes // WORD_BYTES
        for n, (piece, block, _) in enumerate(batch):
            source, destination = block * words + piece.offset // WORD_BYTES, piece.staging * piece_words
            self._rows.fill(begins + n, n, source, destination, piece.length // WORD_BYTES, piece.checksum)
        self._rows.up(self._gathering, begins, count)
        longest = max(move.piece.length for move in batch) // WORD_BYTES
        self._movers[first.group].move(self._gathering, begins, count, longest)
        read = self._gathering.moment()
        self._wire.after(read)
        place, length = begins * self._piece_bytes, (count - 1) * self._piece_bytes + last.length
        self._wire.copy(self._window.address + place, self._staging.address + place, length)
        self._rows.down(self._wire, begins, count, self._registered.address + ROWS)
        self._reading.append((read, count))
