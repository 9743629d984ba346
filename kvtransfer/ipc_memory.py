"""What the two ends of an ipc link both map: a ring each way, and the window of staging behind them."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from baton.device.shared_memory import SharedMemory
from kvtransfer.byte_ring import RING_BYTES, RingReader, RingWriter
from kvtransfer.inbox import CONTROL_FRAMES

_TO_RECEIVER = 0
_TO_SENDER = RING_BYTES
# A page's multiple for every page size in use.
_WINDOW = -(-2 * RING_BYTES // 65536) * 65536


class LinkMemory:
    """One link's memory, anonymous: it is gone when both ends have unmapped it."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self.window: NDArray[np.uint8] = shared.bytes[_WINDOW:]

    @classmethod
    def create(cls, window_bytes: int) -> LinkMemory:
        """By the receiver. OSError where there is none to be had."""
        return cls(SharedMemory.create("baton-link", _WINDOW + window_bytes))

    @classmethod
    def attach(cls, descriptor: int, window_bytes: int) -> LinkMemory:
        """By the sender, which gives the descriptor away. ValueError for memory of another shape, OSError."""
        try:
            shared = SharedMemory.attach(descriptor)
        except (ValueError, OSError):
            os.close(descriptor)
            raise
        shared.drop_descriptor()
        shared.keep_from_children()
        if shared.size != _WINDOW + window_bytes:
            shared.unmap()
            raise ValueError(f"{shared.size} bytes are not a window of {window_bytes} and its rings")
        return cls(shared)

    @property
    def descriptor(self) -> int:
        return self._shared.fd

    def drop_descriptor(self) -> None:
        self._shared.drop_descriptor()

    def receiver_rings(self, window_pieces: int) -> tuple[RingReader, RingWriter]:
        """What comes from the sender, what goes to it."""
        out = RingWriter(self._shared, _TO_SENDER, 2 * window_pieces + CONTROL_FRAMES)
        return RingReader(self._shared, _TO_RECEIVER), out

    def sender_rings(self, window_pieces: int) -> tuple[RingReader, RingWriter]:
        out = RingWriter(self._shared, _TO_RECEIVER, window_pieces + CONTROL_FRAMES)
        return RingReader(self._shared, _TO_SENDER), out

    def unmap(self) -> None:
        """When every ring and view is closed; BufferError else."""
        self.window = np.empty(0, dtype=np.uint8)
        self._shared.unmap()
