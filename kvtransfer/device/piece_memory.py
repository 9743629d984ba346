"""Staging in a device's memory: pieces by index, before each of them a head where its transport has one.

    head 0 | piece 0 | head 1 | piece 1 …     `stride` bytes apart; seen from outside, pieces alone

A head is for the parts of its piece's sum (`piece_sums`), where they travel with the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.device.link_device import LinkDevice, Memory
from kvtransfer.device.piece_sums import ROW_BYTES, sum_of

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNED = 16


class PieceMemory:
    """A `Window`. Whose it is frees it. Who has heads has a transport that brings bytes into this process's
    memory itself: no other opens it."""

    def __init__(self, device: LinkDevice, pieces: int, piece_bytes: int, *, heads: bool = False) -> None:
        """OSError where the device has no room."""
        self.head = ROW_BYTES if heads else 0
        self.stride = self.head + (-(-piece_bytes // _ALIGNED) * _ALIGNED if heads else piece_bytes)
        self.size = pieces * piece_bytes
        self._piece_bytes = piece_bytes
        allocate = device.allocate_own if heads else device.allocate
        self.memory: Memory = allocate(pieces * self.stride)

    @property
    def tensor(self) -> Tensor:
        """uint8, from the first piece's first byte on."""
        return self.memory.tensor[self.head :]

    def address(self, index: int) -> int:
        """Where an index begins, with its head."""
        return self.memory.address + index * self.stride

    def place(self, index: int) -> int:
        """As sums have it: of the parts of an index's."""
        return self.address(index)

    def parts(self, index: int) -> Tensor:
        """int64 [SUM_PARTS]: the head of an index."""
        import torch

        begins = index * self.stride
        return self.memory.tensor[begins : begins + self.head].view(torch.int64)

    def sum_of(self, index: int) -> int:
        """That of an index's head; waits for the device."""
        begins = index * self.stride
        return sum_of(self.memory[begins : begins + self.head].view(np.uint64))

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        """A copy on the host, of bytes of one piece."""
        index, at = divmod(part.start, self._piece_bytes)
        begins = index * self.stride + self.head + at
        return self.memory[begins : begins + part.stop - part.start]

    def free(self) -> None:
        """When every line that moves its bytes is over. Idempotent."""
        self.memory.free()
