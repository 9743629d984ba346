"""Checksums of pieces that a kernel moves: each of its programs writes a partial sum, and the host adds them.

    parts   uint64 [staging indices, SUM_PARTS], in host memory, written by a device; twice as wide where the
            partial sums of the sender travel before their piece, and are copied here

So a sum needs no device memory that must be cleared, and no copy to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtransfer.device.kernels.move_plan import SUM_PARTS

if TYPE_CHECKING:
    from torch import Tensor

ROW_BYTES = 8 * SUM_PARTS


def sum_of(parts: NDArray[np.uint64]) -> int:
    """The sum of the parts mod 2^64."""
    return int(np.add.reduce(parts))


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
        """Where a device writes the parts of a staging index."""
        return self._address + index * self._row_bytes

    def parts(self, index: int) -> Tensor:
        """The parts of a staging index: int64 [SUM_PARTS]."""
        import torch

        return torch.from_numpy(self._parts[index].view(np.int64))

    def of(self, index: int) -> int:
        """The sum of the words that were moved last, in [0, 2^64), once the device is done with them."""
        return sum_of(self._parts[index])

    def clear_reported(self, index: int) -> None:
        """Clears the sender's sum of the piece that had the index before; a move writes it anew."""
        self._reported[index] = 0

    def reported(self, index: int) -> int:
        """The sum that the sender computed, of a piece that was moved."""
        return sum_of(self._reported[index])

    def reported_parts(self, index: int) -> Tensor:
        """The sender's parts of a staging index: int64 [SUM_PARTS]."""
        import torch

        return torch.from_numpy(self._reported[index].view(np.int64))

    def detach(self) -> None:
        """Drops every view of the memory; no call may follow."""
        self._parts, self._reported = self._parts[:0].copy(), self._reported[:0].copy()
