"""Cuts blocks into pieces; both ends of a link compute the same cut.

A block of cache group g has `block_bytes[g]` bytes. Its pieces start at multiples of `piece_bytes`; the last
one may be shorter. On a link with `multi_block` pieces, a piece may also be several whole blocks with
consecutive ordinals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class PieceGeometry:
    """Block sizes by cache group and the maximum size of a piece, all in bytes."""

    block_bytes: tuple[int, ...]
    piece_bytes: int
    multi_block: bool = False

    @staticmethod
    def of(block_bytes: Sequence[int], piece_bytes: int, *, multi_block: bool = False) -> PieceGeometry:
        """Creates the geometry of a layout's blocks. Raises ValueError for sizes that are not positive."""
        if piece_bytes < 1 or not block_bytes or min(block_bytes) < 1:
            raise ValueError(f"cannot cut blocks of {list(block_bytes)} bytes into pieces of {piece_bytes}")
        return PieceGeometry(tuple(block_bytes), piece_bytes, multi_block)

    def pieces_per_block(self, group: int) -> int:
        return -(-self.block_bytes[group] // self.piece_bytes)

    def max_blocks_per_piece(self, group: int) -> int:
        if not self.multi_block:
            return 1
        return min(MAX_BLOCKS, max(1, self.piece_bytes // self.block_bytes[group]))

    def piece_length(self, group: int, offset: int) -> int:
        """Bytes of the single-block piece that starts at `offset` of a block."""
        return min(self.piece_bytes, self.block_bytes[group] - offset)

    def blocks_of(self, group: int, length: int) -> int:
        """Number of blocks that a piece of `length` bytes belongs to."""
        return max(1, length // self.block_bytes[group])

    def is_piece(self, group: int, offset: int, length: int) -> bool:
        """True if blocks of this group are cut into such a piece."""
        if not 0 <= group < len(self.block_bytes):
            return False
        size = self.block_bytes[group]
        if length > size:
            return offset == 0 and length % size == 0 and length // size <= self.max_blocks_per_piece(group)
        return (
            0 <= offset < size
            and offset % self.piece_bytes == 0
            and length == self.piece_length(group, offset)
        )


def max_pieces_per_transfer(window_pieces: int, *, between_devices: bool) -> int:
    """Most pieces of a window that one transfer may occupy, so that others always find room.

    Between devices a window holds about a millisecond of traffic, and waiting for credits costs throughput,
    so the share is larger there.
    """
    return max(1, window_pieces * 3 // 4 if between_devices else window_pieces // 2)
