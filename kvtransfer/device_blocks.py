"""Blocks in a device's memory, as links that move them there need them: where they are, and who says which.

A link between two devices has its own cut of blocks into pieces: large ones, since a piece costs each host
some microseconds, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from baton.device.link_device import LinkDevice
from kvtransfer.moving import ROW_WORDS, WORD_BYTES, Travels, words_of
from kvtransfer.row_mover import RowMover

# A block of 64 tokens of an 8B model in 16 bits.
LARGEST_PIECE_BYTES = 8 << 20
_ALIGNED_BYTES = 16


class DeviceBlocks:
    """The pools of every cache group, [blocks, …] each, contiguous, on `device`."""

    def __init__(self, device: LinkDevice, pools: Sequence[Tensor]) -> None:
        """ValueError where blocks are no whole words."""
        self.device = device
        self.words = tuple(words_of(pool) for pool in pools)
        self.block_bytes = tuple(pool[0].nbytes for pool in pools)
        self.block_words = tuple(size // WORD_BYTES for size in self.block_bytes)
        if any(size % WORD_BYTES for size in self.block_bytes):
            raise ValueError(f"blocks of {self.block_bytes} bytes are no whole words")

    def aligned(self, piece_bytes: int) -> bool:
        """Whether all pieces begin and end at multiples of 16 bytes."""
        return not any(size % _ALIGNED_BYTES for size in (piece_bytes, *self.block_bytes))

    def warm(self) -> None:
        """Compiles what moves them, where that takes its time: not while somebody waits for a transfer."""
        table = self.device.table(1, ROW_WORDS)
        aligned = self.aligned(self.largest_piece())
        for travels in Travels:
            RowMover(self.words[0], self.words[0], table, travels, aligned=aligned)

    def largest_piece(self) -> int:
        """What a piece has at most, unless told otherwise: a block of the largest, where that is not too
        much."""
        return min(LARGEST_PIECE_BYTES, max(self.block_bytes))


class DeviceSink:
    """Where a receiver's bytes go that arrive in its device's memory."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        place: Callable[[int, int, int], int],
        *,
        window_pieces: int,
        piece_bytes: int | None = None,
    ) -> None:
        """`place`: the block that the ticket of a transfer reserved as `ordinal`-th of a group."""
        self.blocks = blocks
        self.place = place
        self.window_pieces = window_pieces
        self.piece_bytes = piece_bytes if piece_bytes is not None else blocks.largest_piece()
