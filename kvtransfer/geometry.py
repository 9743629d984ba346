"""How blocks are cut into pieces: both ends of a link compute it alike.

A block of cache group g has `block_bytes[g]` bytes. Its pieces start at the multiples of
`piece_bytes`; the last one may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """Block sizes by cache group, and the size pieces have at most; all in bytes."""

    block_bytes: tuple[int, ...]
    piece_bytes: int

    @staticmethod
    def of(block_bytes: Sequence[int], piece_bytes: int) -> Geometry:
        if piece_bytes < 1 or not block_bytes or min(block_bytes) < 1:
            raise ValueError(f"cannot cut blocks of {list(block_bytes)} bytes into pieces of {piece_bytes}")
        return Geometry(tuple(block_bytes), piece_bytes)

    def pieces_per_block(self, group: int) -> int:
        return -(-self.block_bytes[group] // self.piece_bytes)

    def piece_length(self, group: int, offset: int) -> int:
        """Bytes of the piece that starts at `offset` of a block."""
        return min(self.piece_bytes, self.block_bytes[group] - offset)

    def is_piece(self, group: int, offset: int, length: int) -> bool:
        """Whether a block of this group has just this piece."""
        return (
            0 <= group < len(self.block_bytes)
            and 0 <= offset < self.block_bytes[group]
            and offset % self.piece_bytes == 0
            and length == self.piece_length(group, offset)
        )
