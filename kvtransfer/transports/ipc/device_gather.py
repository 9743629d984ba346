"""The sender's half of a link between devices: blocks into the receiver's window, summed where they lie.

    the wire           blocks ──copy──▶ window
    the telling line   blocks ──kernel─▶ sums of the link's memory
                       how many ───────▶ `landed` there, when the copy is done

A copy engine reads blocks as they are: each is one stretch of memory, whose bytes are on their way before a
kernel could have begun. They are said in one call, which leaves no pause between them: blocks of 8 MiB reach
372 GB/s between two H200s, said one by one 344, over two streams no more (one engine copies for both), and
the whole in one piece 391. Nothing waits here but `close`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from baton.device.stream import Event
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.kernels.move_plan import Act
from kvtransfer.device.mover import RowMover
from kvtransfer.device.reads import BlockReads
from kvtransfer.protocol.frames import Piece
from kvtransfer.transports.ipc.memory import LANDED, LinkMemory

_AWAKE_S = 100e-6
_TOUCHED_BYTES = 1 << 16


class DeviceGather:
    """Owned by the loop once made; making it may take milliseconds. OSError where the device refuses."""

    def __init__(
        self, blocks: DeviceBlocks, memory: LinkMemory, window_pieces: int, piece_bytes: int
    ) -> None:
        import torch

        device = blocks.device
        self._piece_bytes = piece_bytes
        self._pieces = window_pieces
        self._block_bytes = blocks.block_bytes
        self._pools = blocks.addresses
        with ExitStack() as undo:
            self._registered = device.register(memory.shared)
            undo.callback(self._registered.release)
            self._window = device.open(memory.handle)
            undo.callback(self._window.close)
            self._sums = memory.sums(window_pieces, self._registered.address)
            undo.callback(self._sums.let_go)
            self._mover = RowMover(blocks, window_pieces, piece_bytes, Act.READ, sums=self._sums)
            # The next chunk's kernels would else go before what somebody waits for.
            self._wire, self._telling, self._waking = (device.stream(high_priority=True) for _ in range(3))
            touched = min(_TOUCHED_BYTES, window_pieces * piece_bytes)
            self._nowhere = torch.empty(touched, dtype=torch.uint8, device=device.tensors_on)
            self._let_go = undo.pop_all()
        self._landed = self._registered.address + LANDED
        self._reads = BlockReads()
        self._sent = 0
        self._awake_until = 0.0
        self._waited_for: Event | None = None

    def keep_awake(self) -> None:
        """Reads a little of the window. A link that has been idle while its GPU computed for 25 ms lets the
        first copy wait for 170 µs (two H200s; reads of 16 bytes change nothing, these do)."""
        now = time.monotonic()
        if now < self._awake_until or (self._reads.under_way and not self._waits()):
            return
        self._awake_until = now + _AWAKE_S
        self._waking.copy(self._nowhere.data_ptr(), self._window.address, self._nowhere.nbytes)

    def _waits(self) -> bool:
        """Whether what was said last has not begun."""
        return self._waited_for is not None and not self._waited_for.query()

    def gather(self, piece: Piece, blocks: Sequence[int], after: Event | None = None) -> None:
        """Says to the device what is to be done with the next piece that is announced, whose checksum is its
        place's alone, and whose blocks are final at that moment. RuntimeError where it refuses: then nobody
        reads the piece."""
        self._reads.put()
        self._sent += 1
        if after is not None and after is not self._waited_for:
            self._waited_for = after
            for stream in (self._wire, self._telling):
                stream.wait_event(after)
        if piece.staging < self._pieces:  # what the window does not have is written nowhere
            self._copy(piece, blocks)
            self._mover.move(self._telling, self._mover.prepare(piece, blocks, piece.checksum))
        self._telling.wait_event(self._wire.record_event())
        self._telling.publish(self._landed, self._sent)
        self._reads.read_by(self._telling.record_event())

    def _copy(self, piece: Piece, blocks: Sequence[int]) -> None:
        size = self._block_bytes[piece.group]
        source = self._pools[piece.group] + piece.offset
        there = self._window.address + piece.staging * self._piece_bytes
        each = min(size, piece.length)
        self._wire.copy_batch(there, [source + block * size for block in blocks], each)

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
            for stream in (self._waking, self._wire, self._telling):
                stream.synchronize()
            self._let_go.close()
        finally:
            self._reads.end()
