"""What the programs that move a piece have found of its words' sum, each its part; the host adds them up.

    parts   uint64 [staging indices, SUM_PARTS], in the host's memory, written by a device

So a sum needs no memory of the device's that somebody has to clear, and no copy to the host.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtransfer.move_plan import SUM_PARTS

ROW_BYTES = 8 * SUM_PARTS
_MASK = (1 << 64) - 1


class PieceSums:
    """Of one link's staging. Whose memory it is keeps it until every line that writes it has finished."""

    def __init__(self, parts: NDArray[np.uint64], address: int) -> None:
        """`address`: of the parts, as the device finds them."""
        self.parts = parts
        self._address = address

    def place(self, index: int) -> int:
        """Where a device writes the parts of a staging index."""
        return self._address + index * ROW_BYTES

    def of(self, index: int) -> int:
        """The sum of the words that were moved last, in [0, 2^64), once the device is done with them."""
        return int(np.add.reduce(self.parts[index])) & _MASK

    def let_go(self) -> None:
        """Of the memory; `of` is not called any more."""
        self.parts = self.parts[:0].copy()
