"""Staging in device memory, and checksums of the pieces that a kernel moves.

    header 0 | piece 0 | header 1 | piece 1 …     `stride` bytes apart; `WindowMemory` has the pieces alone

Each program of a kernel writes a partial sum, and the host adds them, so a sum needs no device memory that
must be cleared, and no copy to the host:

    parts   uint64 [staging indices, SUM_PARTS], in host memory, written by a device; twice as wide where the
            partial sums of the sender travel before their piece, as its header, and are copied here
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.device.streams.link_device import LinkDevice, Memory
from kvtransfer.device.kernels.move_plan import SUM_PARTS

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 16
ROW_BYTES = 8 * SUM_PARTS


class PieceMemory:
    """A `WindowMemory`, freed by its owner. With headers, no other process can open it: its transport brings
    bytes into this process's memory itself."""

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

    @property
    def first(self) -> int:
        """The device address of the first piece's first byte."""
        return self.memory.address + self.head

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
        return _sum_of(self._on_host(begins, self.head).view(np.uint64))

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


class OpenedWindow:
    """The window of a receiver in another process, as its sender's device writes it. `first`: the address of
    its first byte; `stride`: bytes of a piece."""

    head = 0

    def __init__(self, address: int, pieces: int, piece_bytes: int) -> None:
        self.first = address
        self.stride = piece_bytes
        self._size = pieces * piece_bytes

    @property
    def tensor(self) -> Tensor:
        """uint8, of a window in host memory, which its owner must outlive."""
        import torch

        memory = (ctypes.c_uint8 * self._size).from_address(self.first)
        return torch.from_numpy(np.ctypeslib.as_array(memory))


class PieceSums:
    """The partial sums of one link's staging. The memory's owner must keep it until every stream that writes
    it was synchronized."""

    def __init__(self, parts: NDArray[np.uint64], address: int) -> None:
        """`address`: of `parts`, on the device."""
        self._parts = parts[:, :SUM_PARTS]
        self._reported = parts[:, SUM_PARTS:]
        self._address = address
        self._row_bytes: int = parts.itemsize * parts.shape[1]

    def address_of(self, index: int) -> int:
        """Address at which a device writes the partial sums of a staging index."""
        return self._address + index * self._row_bytes

    def parts(self, index: int) -> Tensor:
        """The parts of a staging index: int64 [SUM_PARTS]."""
        import torch

        return torch.from_numpy(self._parts[index].view(np.int64))

    def of(self, index: int) -> int:
        """The sum of the words that were moved last, in [0, 2^64), once the device is done with them."""
        return _sum_of(self._parts[index])

    def clear_reported(self, index: int) -> None:
        """Clears the sender's sum of the piece that had the index before; the next move writes it."""
        self._reported[index] = 0

    def reported(self, index: int) -> int:
        """The sum that the sender computed, of a piece that was moved."""
        return _sum_of(self._reported[index])

    def reported_parts(self, index: int) -> Tensor:
        """The sender's parts of a staging index: int64 [SUM_PARTS]."""
        import torch

        return torch.from_numpy(self._reported[index].view(np.int64))

    def detach(self) -> None:
        """Drops every view of the memory; no call may follow."""
        self._parts, self._reported = self._parts[:0].copy(), self._reported[:0].copy()


def _sum_of(parts: NDArray[np.uint64]) -> int:
    """The sum of the parts mod 2^64."""
    return int(np.add.reduce(parts))
