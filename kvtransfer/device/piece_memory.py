"""Staging in device memory: pieces by index, each with a header where its transport has one.

    header 0 | piece 0 | header 1 | piece 1 …     `stride` bytes apart; a `Window` shows the pieces alone

A header has the partial sums of its piece (`piece_sums`), where they travel with the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.device.link_device import LinkDevice, Memory
from kvtransfer.device.piece_sums import ROW_BYTES, sum_of

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 16


class PieceMemory:
    """A `Window`, freed by its owner. With headers, no other process can open it: its transport brings bytes
    into this process's memory itself."""

    def __init__(self, device: LinkDevice, pieces: int, piece_bytes: int, *, heads: bool = False) -> None:
        """OSError where the device has no memory left."""
        self.head = ROW_BYTES if heads else 0
        self.stride = self.head + (-(-piece_bytes // _ALIGNMENT) * _ALIGNMENT if heads else piece_bytes)
        self.size = pieces * piece_bytes
        self._piece_bytes = piece_bytes
        allocate = device.allocate_own if heads else device.allocate
        self.memory: Memory = allocate(pieces * self.stride)

    @property
    def tensor(self) -> Tensor:
        """uint8, from the first piece's first byte on."""
        return self.memory.tensor[self.head :]

    def address_of(self, index: int) -> int:
        """The device address of an index's header, or of its piece where there are no headers."""
        return self.memory.address + index * self.stride

    def parts(self, index: int) -> Tensor:
        """The header of an index: int64 [SUM_PARTS]."""
        import torch

        begins = index * self.stride
        return self.memory.tensor[begins : begins + self.head].view(torch.int64)

    def sum_of(self, index: int) -> int:
        """The sum in an index's header, in [0, 2^64); synchronizes with the device."""
        begins = index * self.stride
        return sum_of(self._on_host(begins, self.head).view(np.uint64))

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        """A copy on the host, of bytes of one piece."""
        index, at = divmod(part.start, self._piece_bytes)
        begins = index * self.stride + self.head + at
        return self._on_host(begins, part.stop - part.start)

    def _on_host(self, begins: int, size: int) -> NDArray[np.uint8]:
        """A copy of `size` bytes; synchronizes with the device."""
        return self.memory.tensor[begins : begins + size].to("cpu", copy=True).numpy()

    def free(self) -> None:
        """Frees it; all work that accesses it must have finished. Idempotent."""
        self.memory.free()
