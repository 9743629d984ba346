"""What the two ends of an ipc link both map: a ring each way, and behind them the window of staging, or,
where the window is a device's memory, what a device writes beside it.

    ring to the receiver | ring to the sender | window                                           on the host
                                              | handle of the window | landed | sums         on a device

Sums are by staging index, in parts (`piece_sums`): what the sender's device found. `landed` counts the pieces
whose bytes and sum are there, in the order in which they were announced. The sender's device writes them.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from baton.device.link_device import MAX_HANDLE_BYTES
from baton.device.shared_memory import SharedMemory
from kvtransfer.device.kernels.move_plan import SUM_PARTS
from kvtransfer.device.piece_sums import ROW_BYTES, PieceSums
from kvtransfer.link.frame_queue import CONTROL_FRAMES
from kvtransfer.transports.ipc.byte_ring import RING_BYTES, RingReader, RingWriter

_TO_RECEIVER = 0
_TO_SENDER = RING_BYTES
# A page's multiple for every page size in use.
_WINDOW = -(-2 * RING_BYTES // 65536) * 65536
LANDED = _WINDOW + MAX_HANDLE_BYTES
SUMS = LANDED + MAX_HANDLE_BYTES  # a line of the cache of its own


class LinkMemory:
    """One link's memory, anonymous: it is gone when both ends have unmapped it."""

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self.window: NDArray[np.uint8] = shared.bytes[_WINDOW:]

    @classmethod
    def create(cls, window_bytes: int) -> LinkMemory:
        """By the receiver, the window in it. OSError where there is none to be had."""
        return cls(SharedMemory.create("baton-link", _WINDOW + window_bytes))

    @classmethod
    def create_beside(cls, handle: bytes, window_pieces: int) -> LinkMemory:
        """By the receiver, whose window is a device's memory of this handle. OSError."""
        memory = cls(SharedMemory.create("baton-link", SUMS + window_pieces * ROW_BYTES))
        memory.window[: len(handle)] = np.frombuffer(handle, dtype=np.uint8)
        return memory

    @classmethod
    def attach(cls, descriptor: int, window_bytes: int) -> LinkMemory:
        """By the sender, which gives the descriptor away. ValueError for memory of another shape, OSError."""
        return cls._attach(descriptor, _WINDOW + window_bytes)

    @classmethod
    def attach_beside(cls, descriptor: int, window_pieces: int) -> LinkMemory:
        """`attach`, where the window is a device's memory."""
        return cls._attach(descriptor, SUMS + window_pieces * ROW_BYTES)

    @classmethod
    def _attach(cls, descriptor: int, size: int) -> LinkMemory:
        try:
            shared = SharedMemory.attach(descriptor)
        except (ValueError, OSError):
            os.close(descriptor)
            raise
        shared.drop_descriptor()
        shared.keep_from_children()
        if shared.size != size:
            shared.unmap()
            raise ValueError(f"{shared.size} bytes of memory where {size} were said")
        return cls(shared)

    @property
    def descriptor(self) -> int:
        return self.shared.fd

    def drop_descriptor(self) -> None:
        self.shared.drop_descriptor()

    @property
    def handle(self) -> bytes:
        """Of the window that lies elsewhere."""
        return self.window[:MAX_HANDLE_BYTES].tobytes()

    def landed(self) -> NDArray[np.uint64]:
        """[1]."""
        landed: NDArray[np.uint64] = self.shared.region(LANDED, 1, "<u8")
        return landed

    def sums(self, window_pieces: int, address: int = 0) -> PieceSums:
        """`address`: of the memory's first byte, as the device finds it that writes them."""
        parts = self.shared.region(SUMS, window_pieces * SUM_PARTS, "<u8")
        return PieceSums(parts.reshape(window_pieces, SUM_PARTS), address + SUMS)

    def receiver_rings(self, window_pieces: int) -> tuple[RingReader, RingWriter]:
        """What comes from the sender, what goes to it."""
        out = RingWriter(self.shared, _TO_SENDER, 2 * window_pieces + CONTROL_FRAMES)
        return RingReader(self.shared, _TO_RECEIVER), out

    def sender_rings(self, window_pieces: int) -> tuple[RingReader, RingWriter]:
        """What comes from the receiver, what goes to it."""
        out = RingWriter(self.shared, _TO_RECEIVER, window_pieces + CONTROL_FRAMES)
        return RingReader(self.shared, _TO_SENDER), out

    def unmap(self) -> None:
        """When every ring and view is closed; BufferError else."""
        self.window = np.empty(0, dtype=np.uint8)
        self.shared.unmap()
