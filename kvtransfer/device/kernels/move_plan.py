"""Constants and modes of moves between blocks and staging. Torch-free, so that a process whose links have no
device need not load torch."""

from __future__ import annotations

from enum import Enum

WORD_BYTES = 4
# The columns of a run: source, destination, length, in the piece's first row the initial value of its sum,
# place in the piece.
ROW_WORDS = 5
# The maximum number of programs that share a piece; each writes one partial sum.
SUM_PARTS = 128


class Direction(Enum):
    """Target of a piece's words; their sum is computed in any case."""

    GATHER = 0  # from blocks into staging
    SCATTER = 1  # from staging into blocks
    READ = 2  # nowhere
