"""The sender's half of an ipc link between devices: copies blocks into the receiver's window, with checksums.

    copy stream     blocks ──copy──▶ window
    sum stream      blocks ──kernel─▶ sums in the link's memory
                    number of pieces ▶ `arrived` there, after both

A copy engine reads blocks where they are: each is contiguous, and its bytes are in flight before a kernel
could have started. The copies of a piece are enqueued by one call, which leaves no gap between them: blocks
of 8 MiB reach 372 GB/s between two H200s, enqueued one by one 344, over two streams no more (one engine
copies for both), and as one large piece 391. Only `close` blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from baton.device.stream import Event
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.kernels.move_plan import Direction
from kvtransfer.device.mover import RowMover
from kvtransfer.device.reads import BlockReads
from kvtransfer.protocol.frames import Piece
from kvtransfer.transports.ipc.memory import ARRIVED, LinkMemory

_WARM_S = 100e-6
_WARM_BYTES = 1 << 16


class DeviceGather:
    """Owned by the loop once made; making it may take milliseconds. OSError, RuntimeError where the device
    fails."""

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
            undo.callback(self._registered.close)
            self._window = device.open(memory.handle)
            undo.callback(self._window.close)
            self._sums = memory.sums(window_pieces, self._registered.address)
            undo.callback(self._sums.detach)
            self._mover = RowMover(blocks, window_pieces, piece_bytes, Direction.READ, sums=self._sums)
            # High priority: otherwise the next chunk's kernels would go first.
            self._copies, self._summing, self._warming = (device.stream(high_priority=True) for _ in range(3))
            warm_bytes = min(_WARM_BYTES, window_pieces * piece_bytes)
            self._scratch = torch.empty(warm_bytes, dtype=torch.uint8, device=device.tensors_on)
            self._resources = undo.pop_all()
        self.reads = BlockReads(self._read)
        self._arrived = self._registered.address + ARRIVED
        self._sent = 0
        self._warm_until = 0.0
        self._waited_for: Event | None = None

    def keep_warm(self) -> None:
        """Reads a little of the window. On a link that was idle while its GPU computed for 25 ms, the first
        copy starts 170 µs late (two H200s; reads of 16 bytes change nothing, these do)."""
        now = time.monotonic()
        if now < self._warm_until or (self.reads.busy and not self._waiting()):
            return
        self._warm_until = now + _WARM_S
        self._warming.copy(self._scratch.data_ptr(), self._window.address, self._scratch.nbytes)

    def _waiting(self) -> bool:
        """Whether the last piece waits for its blocks to become final."""
        return self._waited_for is not None and not self._waited_for.query()

    def _read(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event:
        """Enqueues the copy and the sum of the next announced piece. RuntimeError where the device fails."""
        self._sent += 1
        if after is not None and after is not self._waited_for:
            self._waited_for = after
            for stream in (self._copies, self._summing):
                stream.wait_event(after)
        if piece.staging < self._pieces:  # the receiver reports an index outside the window
            self._copy(piece, blocks)
            self._mover.move(self._summing, self._mover.prepare(piece, blocks, piece.checksum))
        self._summing.wait_event(self._copies.record_event())
        self._summing.publish(self._arrived, self._sent)
        return self._summing.record_event()

    def _copy(self, piece: Piece, blocks: Sequence[int]) -> None:
        size = self._block_bytes[piece.group]
        source = self._pools[piece.group] + piece.offset
        destination = self._window.address + piece.staging * self._piece_bytes
        each = min(size, piece.length)
        self._copies.copy_batch(destination, [source + block * size for block in blocks], each)

    def close(self) -> None:
        """Blocks until the device has done all of it; afterwards it cannot write the window. RuntimeError
        where that is not certain: then nothing is read any more either."""
        try:
            for stream in (self._warming, self._copies, self._summing):
                stream.synchronize()
            self._resources.close()
        finally:
            self.reads.end()
