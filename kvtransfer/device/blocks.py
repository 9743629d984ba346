"""Blocks in a device's memory, as links that move them there need them: where they are, and who says which.

A link between two devices has its own cut of blocks into pieces: large ones, since a piece costs each host
some microseconds, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.device.link_device import LinkDevice
from kvtransfer.device.kernels.move_plan import WORD_BYTES
from kvtransfer.protocol.piece_geometry import MOST_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor

# Eight blocks of 64 tokens of an 8B model in 16 bits, which are on the wire for longer than the hosts take to
# speak of them, and four such pieces on their way.
_PIECE_BYTES = 64 << 20
WINDOW_PIECES = 4
_ALIGNED_BYTES = 16


def largest_piece(block_bytes: Sequence[int]) -> int:
    """What a piece has at most, unless told otherwise: whole blocks of the largest, where one is not too
    much."""
    largest = max(block_bytes)
    if largest > _PIECE_BYTES:
        return _PIECE_BYTES
    return largest * min(MOST_BLOCKS, _PIECE_BYTES // largest)


def staging_bytes(block_bytes: Sequence[int]) -> int:
    """What a link between devices takes of either: the receiver's window, or the sender's half of it."""
    return WINDOW_PIECES * largest_piece(block_bytes)


class DeviceBlocks:
    """The pools of every cache group, [blocks, …] each, contiguous, on `device`."""

    def __init__(self, device: LinkDevice, pools: Sequence[Tensor]) -> None:
        """ValueError where blocks are no whole words."""
        from kvtransfer.device.reference import words_of

        self.device = device
        self.words = tuple(words_of(pool) for pool in pools)
        self.addresses = tuple(pool.data_ptr() for pool in pools)
        self.block_bytes = tuple(pool[0].nbytes for pool in pools)
        self.block_words = tuple(size // WORD_BYTES for size in self.block_bytes)
        if any(size % WORD_BYTES for size in self.block_bytes):
            raise ValueError(f"blocks of {self.block_bytes} bytes are no whole words")

    def aligned(self, piece_bytes: int) -> bool:
        """Whether all pieces begin and end at multiples of 16 bytes."""
        return not any(size % _ALIGNED_BYTES for size in (piece_bytes, *self.block_bytes))

    def largest_piece(self) -> int:
        return largest_piece(self.block_bytes)


class DeviceSink:
    """Where a receiver's bytes go that arrive in its device's memory."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        place: Callable[[int, int, int], int],
        *,
        steps_run: Callable[[], bool] = lambda: False,
        window_pieces: int = WINDOW_PIECES,
        piece_bytes: int | None = None,
    ) -> None:
        """`place`: the block that the ticket of a transfer reserved as `ordinal`-th of a group. `steps_run`:
        whether the device decodes at this moment, and is to be left most of itself."""
        self.blocks = blocks
        self.place = place
        self.steps_run = steps_run
        self.window_pieces = window_pieces
        self.piece_bytes = piece_bytes if piece_bytes is not None else blocks.largest_piece()
