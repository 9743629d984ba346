"""What a move between blocks and staging is told by, for who says it and does not do it. Torch-free, so that
a process which links without a device need not load torch."""

from __future__ import annotations

from enum import Enum

WORD_BYTES = 4
# A run's: source, destination, length, piece, place. Of one piece's rows, the first has in place of `piece`
# what the sum begins with.
ROW_WORDS = 5
# The programs that share a piece, at most: each says what it found of the sum.
SUM_PARTS = 128


class Travels(Enum):
    """Which side of a move is the wire's."""

    DESTINATION = 0  # gather
    SOURCE = 1  # scatter


class Act(Enum):
    """What becomes of a piece's words, which are summed in any case."""

    GATHER = 0  # from blocks into staging
    SCATTER = 1  # from staging into blocks
    READ = 2  # they stay in their blocks
