"""What the programs that move a piece have found of its words' sum, each its part; the host adds them up.

    parts   uint64 [staging indices, SUM_PARTS], in the host's memory, written by a device; twice as wide
            where the parts that a sender found travel before their piece, and are copied there

So a sum needs no memory of the device's that somebody has to clear, and no copy to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.device.kernels.move_plan import SUM_PARTS

if TYPE_CHECKING:
    from torch import Tensor

ROW_BYTES = 8 * SUM_PARTS


def sum_of(parts: NDArray[np.uint64]) -> int:
    """Mod 2^64."""
    return int(np.add.reduce(parts))


class SumPlaces(Protocol):
    """Where a mover leaves parts: here, or in staging, to travel with their piece (`piece_memory`)."""

    def place(self, index: int) -> int:
        """The address of a staging index's, as the device has it."""

    def parts(self, index: int) -> Tensor:
        """The same as int64 [SUM_PARTS]."""


class PieceSums:
    """Of one link's staging. Whose memory it is keeps it until every line that writes it has finished."""

    def __init__(self, parts: NDArray[np.uint64], address: int) -> None:
        """`address`: of the parts, as the device finds them."""
        self._parts = parts[:, :SUM_PARTS]
        self._said = parts[:, SUM_PARTS:]
        self._address = address
        self._row_bytes: int = parts.itemsize * parts.shape[1]

    def place(self, index: int) -> int:
        """Where a device writes the parts of a staging index."""
        return self._address + index * self._row_bytes

    def parts(self, index: int) -> Tensor:
        """As int64 [SUM_PARTS]."""
        import torch

        return torch.from_numpy(self._parts[index].view(np.int64))

    def of(self, index: int) -> int:
        """The sum of the words that were moved last, in [0, 2^64), once the device is done with them."""
        return sum_of(self._parts[index])

    def forget_said(self, index: int) -> None:
        """What was said of the piece that had the index before: only a move says it anew."""
        self._said[index] = 0

    def said(self, index: int) -> int:
        """The sum that its sender found, of a piece that was moved."""
        return sum_of(self._said[index])

    def said_parts(self, index: int) -> Tensor:
        """As int64 [SUM_PARTS]."""
        import torch

        return torch.from_numpy(self._said[index].view(np.int64))

    def let_go(self) -> None:
        """Of the memory; nothing else is called any more."""
        self._parts, self._said = self._parts[:0].copy(), self._said[:0].copy()
