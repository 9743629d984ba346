"""The sender's end of an ipc link between devices: the host announces pieces, and the device copies blocks
into the receiver's window, with checksums, and counts the pieces that are there.

    copy stream     blocks ──copy──▶ window
    sum stream      blocks ──kernel─▶ sums in the link's memory
                    number of pieces ▶ `arrived` there, after both

A copy engine reads blocks where they are: each is contiguous, and its bytes are in flight before a kernel
could have started. Where a worker's devices have them by heads, the kernel brings them as well, straight into
the window, on the sum stream. The copies of a piece are enqueued by one call, which leaves no gap between
them: blocks of 8 MiB reach 372 GB/s between two H200s, enqueued one by one 344, over two streams no more (one
engine copies for both), and as one large piece 391. Only `close` blocks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.stream import Event
from baton.v1.transfer_pb2 import OpenLinkResponse
from kvtransfer.device.blocks import DeviceBlocks, LinkBlocks
from kvtransfer.device.kernels.move_plan import Direction
from kvtransfer.device.mover import RowMover
from kvtransfer.device.movers import PieceMover, gatherer
from kvtransfer.device.piece_memory import OpenedWindow
from kvtransfer.protocol.frames import Piece, encode_piece_header
from kvtransfer.transports.ipc.memory import ARRIVED, LinkMemory
from kvtransfer.transports.ipc.sender_wire import IpcSenderWire

_WARM_S = 100e-6
_WARM_BYTES = 1 << 16


class IpcDeviceSenderWire(IpcSenderWire):
    """A `DeviceSenderWire`. Owned by the loop once made; making it may take milliseconds."""

    on_device = True

    def __init__(
        self,
        sock: socket.socket,
        memory: LinkMemory,
        response: OpenLinkResponse,
        wake: Callable[[], None],
        blocks: LinkBlocks,
    ) -> None:
        """OSError, RuntimeError where the device fails."""
        import torch

        device, pieces, piece_bytes = blocks.device, response.window_pieces, response.piece_bytes
        self._launching = device.launching
        self._block_bytes = blocks.block_bytes
        # Of blocks that are whole on the device, which are copied; else None.
        self._pools = blocks.addresses if isinstance(blocks, DeviceBlocks) else None
        with ExitStack() as undo:
            registered = device.register(memory.shared)
            undo.callback(registered.close)
            self.window = device.open(memory.handle)
            undo.callback(self.window.close)
            sums = memory.sums(pieces, registered.address)
            undo.callback(sums.detach)
            self._mover: PieceMover
            if isinstance(blocks, DeviceBlocks):
                self._mover = RowMover(blocks, pieces, piece_bytes, Direction.READ, sums=sums)
            else:
                window = OpenedWindow(self.window.address, pieces, piece_bytes)
                self._mover = gatherer(blocks, pieces, piece_bytes, sums, window)
            # High priority: otherwise the next chunk's kernels would go first.
            self._copies, self._summing, self._warming = (device.stream(high_priority=True) for _ in range(3))
            warm_bytes = min(_WARM_BYTES, pieces * piece_bytes)
            self._scratch = torch.empty(warm_bytes, dtype=torch.uint8, device=device.tensors_on)
            self._resources = undo.pop_all()
        self._arrived = registered.address + ARRIVED
        self._sent = 0
        self._warm_until = 0.0
        self._waited_for: Event | None = None
        super().__init__(sock, memory, response, wake, between_devices=True)

    def put(self, piece: Piece, payload: memoryview) -> None:
        raise AssertionError("blocks on a device are sent by `announce` and `read`")

    def announce(self, piece: Piece) -> None:
        self._add(encode_piece_header(piece))  # first, so that the receiver prepares meanwhile

    def read(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event | None:
        if self._closed:
            return None
        try:
            return self._gather(piece, blocks, after)
        except RuntimeError as error:
            self._device_failed(error)
            return None

    def _gather(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event:
        """Enqueues what brings and sums an announced piece. RuntimeError where the device fails."""
        self._sent += 1
        if after is not None and after is not self._waited_for:
            self._waited_for = after
            for stream in (self._copies, self._summing):
                stream.wait_event(after)
        if piece.staging < self._pieces:  # the receiver reports an index outside the window
            if self._pools is not None:
                self._copy(self._pools[piece.group], piece, blocks)
            self._mover.move(self._summing, self._mover.prepare(piece, blocks, piece.checksum))
        self._summing.wait_event(self._copies.record_event())
        self._summing.publish(self._arrived, self._sent)
        return self._summing.record_event()

    def _copy(self, pool: int, piece: Piece, blocks: Sequence[int]) -> None:
        size = self._block_bytes[piece.group]
        source = pool + piece.offset
        destination = self.window.address + piece.staging * self._piece_bytes
        each = min(size, piece.length)
        self._copies.copy_batch(destination, [source + block * size for block in blocks], each)

    def keep_warm(self, *, reading: bool) -> None:
        """Reads a little of the window. On a link that was idle while its GPU computed for 25 ms, the first
        copy starts 170 µs late (two H200s; reads of 16 bytes change nothing, these do)."""
        now = time.monotonic()
        if self._closed or now < self._warm_until or (reading and not self._waiting()):
            return
        self._warm_until = now + _WARM_S
        try:
            self._warming.copy(self._scratch.data_ptr(), self.window.address, self._scratch.nbytes)
        except RuntimeError as error:
            self._device_failed(error)

    def _waiting(self) -> bool:
        """True if the last piece waits for its blocks to become final."""
        return self._waited_for is not None and not self._waited_for.query()

    def _device_failed(self, error: RuntimeError) -> None:
        self._break(BatonError(ErrorKind.UNAVAILABLE, f"the device failed: {error}"))

    def _release_device(self) -> None:
        """Blocks until the device has done all of it; afterwards it cannot write the window. RuntimeError
        where that is not certain."""
        with self._launching:  # it unmaps memory, and may be called by the thread that opened the link
            for stream in (self._warming, self._copies, self._summing):
                stream.synchronize()
            self._resources.close()
