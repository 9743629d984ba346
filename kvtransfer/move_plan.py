"""What a move between blocks and staging is told by, for who says it and does not do it. Torch-free, so that
a process which links without a device need not load torch."""

from __future__ import annotations

from enum import Enum

WORD_BYTES = 4
# Of a row: a run's five words and its sum.
ROW_WORDS = 6


class Travels(Enum):
    """Which side of a move is the wire's."""

    DESTINATION = 0  # gather
    SOURCE = 1  # scatter
