"""How blocks are cut into pieces: both ends of a link compute it alike.

A block of cache group g has `block_bytes[g]` bytes. Its pieces start at the multiples of
`piece_bytes`; the last one may be shorter. Over a link that `spans`, a piece may also be several whole
blocks of consecutive ordinals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """Block sizes by cache group, and the size pieces have at most; all in bytes."""

    block_bytes: tuple[int, ...]
    piece_bytes: int
    spans: bool = False

    @staticmethod
    def of(block_bytes: Sequence[int], piece_bytes: int, *, spans: bool = False) -> Geometry:
        if piece_bytes < 1 or not block_bytes or min(block_bytes) < 1:
            raise ValueError(f"cannot cut blocks of {list(block_bytes)} bytes into pieces of {piece_bytes}")
        return Geometry(tuple(block_bytes), piece_bytes, spans)

    def pieces_per_block(self, group: int) -> int:
        return -(-self.block_bytes[group] // self.piece_bytes)

    def blocks_per_piece(self, group: int) -> int:
        """At most."""
        if not self.spans:
            return 1
        return min(MOST_BLOCKS, max(1, self.piece_bytes // self.block_bytes[group]))

    def piece_length(self, group: int, offset: int) -> int:
        """Bytes of the piece that starts at `offset` of a block, and is of this block alone."""
        return min(self.piece_bytes, self.block_bytes[group] - offset)

    def blocks_of(self, group: int, length: int) -> int:
        """How many blocks a piece of so many bytes is of."""
        return max(1, length // self.block_bytes[group])

    def is_piece(self, group: int, offset: int, length: int) -> bool:
        """Whether blocks of this group have just this piece."""
        if not 0 <= group < len(self.block_bytes):
            return False
        size = self.block_bytes[group]
        if length > size:
            return offset == 0 and length % size == 0 and length // size <= self.blocks_per_piece(group)
        return (
            0 <= offset < size
            and offset % self.piece_bytes == 0
            and length == self.piece_length(group, offset)
        )


def share_of(window_pieces: int, *, between_devices: bool) -> int:
    """The most pieces of a window that one transfer holds, so that another always finds room.

    Between devices a window is a millisecond's bytes, and a wire that waits for credits is what costs.
    """
    return max(1, window_pieces * 3 // 4 if between_devices else window_pieces // 2)
