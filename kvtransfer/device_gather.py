"""The sender's half of a link between devices: blocks into staging, staging into the receiver's window.

    the gathering line    blocks ──kernel, sum──▶ staging of ours
    the wire                                      staging ──copy──▶ window
    the telling line                              sum ──────copy──▶ sums of the link's memory
                                                  how many ───────▶ `landed` there

The wire has copies alone, so each begins as the one before ends. A piece is counted when its copy is done.
Index n of staging is copied to index n of the window. It is free when its credit is: the receiver had the
bytes by then. Nothing waits here but `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from kvtransfer.block_reads import BlockReads
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.frames import Piece
from kvtransfer.ipc_memory import LANDED, SUM_BYTES, SUMS, LinkMemory
from kvtransfer.move_plan import Travels
from kvtransfer.row_mover import RowMover


class DeviceGather:
    """Owned by the loop once made; making it may take milliseconds. OSError where the device refuses."""

    def __init__(
        self, blocks: DeviceBlocks, memory: LinkMemory, window_pieces: int, piece_bytes: int
    ) -> None:
        device = blocks.device
        self._piece_bytes = piece_bytes
        self._pieces = window_pieces
        with ExitStack() as undo:
            self._registered = device.register(memory.shared)
            undo.callback(self._registered.release)
            self._window = device.open(memory.handle)
            undo.callback(self._window.close)
            self._staging = device.allocate(window_pieces * piece_bytes)
            undo.callback(self._staging.free)
            staging = self._staging.tensor
            self._mover = RowMover(blocks, staging, window_pieces, piece_bytes, Travels.DESTINATION)
            # The next chunk's kernels would else go before what somebody waits for.
            self._gathering, self._wire = device.line(first=True), device.line(first=True)
            self._telling = device.line(first=True)
            self._let_go = undo.pop_all()
        self._landed, self._sums = self._registered.address + LANDED, self._registered.address + SUMS
        self._reads = BlockReads()
        self._sent = 0

    def gather(self, piece: Piece, blocks: Sequence[int]) -> None:
        """Says to the device what is to be done with the next piece that is announced, whose checksum is its
        place's alone. RuntimeError where it refuses: then nobody reads the piece."""
        self._reads.put()
        self._sent += 1
        if piece.staging < self._pieces:  # what the window does not have is written nowhere
            found = self._mover.move(self._gathering, self._mover.prepare(self._gathering, piece, blocks))
            read = self._gathering.moment()
            self._wire.after(read)
            place = piece.staging * self._piece_bytes
            self._wire.copy(self._window.address + place, self._staging.address + place, piece.length)
            self._telling.after(read)
            self._telling.copy(self._sums + piece.staging * SUM_BYTES, found, SUM_BYTES)
        else:
            read = self._gathering.moment()
        self._reads.read_by(read)
        self._telling.after(self._wire.moment())
        self._telling.publish(self._landed, self._sent)

    @property
    def busy(self) -> bool:
        return self._reads.under_way

    def gathered(self) -> int:
        """How many pieces have been read out of their blocks since the beginning."""
        return self._reads.count()

    def close(self) -> None:
        """Waits until the device has done all of it; from then on it cannot write the window. RuntimeError
        where that cannot be said: then nothing is read any more either."""
        try:
            for line in (self._gathering, self._wire, self._telling):
                line.finish()
            self._let_go.close()
        finally:
            self._reads.end()
