"""The memory that both ends of an ipc link map: a ring in each direction, then the staging window or, where
the window is device memory, what the sender's device writes besides.

    ring to the receiver | ring to the sender | window                                        on the host
                                              | handle of the window | arrived | sums      on a device

Sums are partial sums by staging index (`piece_memory`), computed by the sender's device. `arrived` counts the
pieces whose bytes and sum are there, in the order of their announcements; the sender's device writes it.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from baton.device.shared_memory import SharedMemory
from baton.device.streams.link_device import MAX_HANDLE_BYTES
from kvtransfer.device.kernels.move_plan import SUM_PARTS
from kvtransfer.device.piece_memory import ROW_BYTES, PieceSums
from kvtransfer.link.frame_queue import CONTROL_FRAMES
from kvtransfer.transports.ipc.byte_ring import RING_BYTES, RingReader, RingWriter

_TO_RECEIVER = 0
_TO_SENDER = RING_BYTES
# A multiple of every page size in use.
_WINDOW = -(-2 * RING_BYTES // 65536) * 65536
ARRIVED = _WINDOW + MAX_HANDLE_BYTES
SUMS = ARRIVED + MAX_HANDLE_BYTES  # a cache line of its own


def bytes_for_device(window_pieces: int) -> int:
    """Number of bytes behind the rings if the window is device memory."""
    return SUMS - _WINDOW + window_pieces * ROW_BYTES


class LinkMemory:
    """One link's anonymous shared memory: it is freed when both ends have unmapped it."""

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self.window: NDArray[np.uint8] = shared.bytes[_WINDOW:]

    @classmethod
    def create(cls, window_bytes: int) -> LinkMemory:
        """Memory with a window, at the receiver. OSError."""
        return cls(SharedMemory.create("baton-link", _WINDOW + window_bytes))

    @classmethod
    def create_for_device(cls, handle: bytes, window_pieces: int) -> LinkMemory:
        """Memory for a window of device memory with this handle, at the receiver. OSError."""
        memory = cls.create(bytes_for_device(window_pieces))
        memory.window[: len(handle)] = np.frombuffer(handle, dtype=np.uint8)
        return memory

    @classmethod
    def attach(cls, descriptor: int, window_bytes: int) -> LinkMemory:
        """Maps a receiver's memory with `window_bytes` behind the rings, at the sender; closes the
        descriptor. ValueError for memory of another size, OSError."""
        try:
            shared = SharedMemory.attach(descriptor)
        except (ValueError, OSError):
            os.close(descriptor)
            raise
        shared.drop_descriptor()
        shared.keep_from_children()
        if shared.size != _WINDOW + window_bytes:
            shared.unmap()
            raise ValueError(f"{shared.size} bytes of memory where {_WINDOW + window_bytes} are expected")
        return cls(shared)

    @property
    def handle(self) -> bytes:
        """The handle of a window of device memory."""
        return self.window[:MAX_HANDLE_BYTES].tobytes()

    def arrived(self) -> NDArray[np.uint64]:
        """The counter of arrived pieces: uint64 [1]."""
        arrived: NDArray[np.uint64] = self.shared.region(ARRIVED, 1, "<u8")
        return arrived

    def sums(self, window_pieces: int, address: int = 0) -> PieceSums:
        """Views of the partial sums. `address`: of this memory's first byte, on the device that writes the
        sums."""
        parts = self.shared.region(SUMS, window_pieces * SUM_PARTS, "<u8")
        return PieceSums(parts.reshape(window_pieces, SUM_PARTS), address + SUMS)

    def receiver_rings(self, window_pieces: int) -> tuple[RingReader, RingWriter]:
        """Returns the receiver's ends of the rings: from the sender, to the sender."""
        out = RingWriter(self.shared, _TO_SENDER, 2 * window_pieces + CONTROL_FRAMES)
        return RingReader(self.shared, _TO_RECEIVER), out

    def sender_rings(self, window_pieces: int) -> tuple[RingReader, RingWriter]:
        """Returns the sender's ends of the rings: from the receiver, to the receiver."""
        out = RingWriter(self.shared, _TO_RECEIVER, window_pieces + CONTROL_FRAMES)
        return RingReader(self.shared, _TO_SENDER), out

    def unmap(self) -> None:
        """Unmaps it. BufferError where a ring or view is open."""
        self.window = np.empty(0, dtype=np.uint8)
        self.shared.unmap()
