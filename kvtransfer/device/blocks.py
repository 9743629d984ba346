"""Blocks in device memory, as links between devices use them: their addresses, and which block a piece is
for.

Links between devices cut blocks into large pieces, since a piece costs each host some microseconds, whatever
its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.device.streams.link_device import LinkDevice
from kvtransfer.device.kernels.move_plan import WORD_BYTES
from kvtransfer.protocol.piece_geometry import MAX_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor

    from baton.device.heads.moves import HeadMoves

# Eight blocks of 64 tokens of an 8B model in 16 bits: on the wire for longer than the hosts take to announce
# them; and four such pieces in flight.
_PIECE_BYTES = 64 << 20
WINDOW_PIECES = 4
_ALIGNED_BYTES = 16


def default_piece_bytes(block_bytes: Sequence[int]) -> int:
    """The default maximum size of a piece: a whole number of the largest blocks, where one is not too
    large."""
    largest = max(block_bytes)
    if largest > _PIECE_BYTES:
        return _PIECE_BYTES
    return largest * min(MAX_BLOCKS, _PIECE_BYTES // largest)


def staging_bytes(block_bytes: Sequence[int]) -> int:
    """Device memory that a link takes at either end."""
    return WINDOW_PIECES * default_piece_bytes(block_bytes)


class DeviceBlocks:
    """The pools of all cache groups on one device."""

    def __init__(self, device: LinkDevice, pools: Sequence[Tensor]) -> None:
        """`pools`: of each cache group [blocks, …], contiguous. ValueError where a block is not a whole
        number of words."""
        from kvtransfer.device.reference import words_of

        self.device = device
        self.words = tuple(words_of(pool) for pool in pools)
        self.addresses = tuple(pool.data_ptr() for pool in pools)
        self.block_bytes = tuple(pool[0].nbytes for pool in pools)
        self.block_words = tuple(size // WORD_BYTES for size in self.block_bytes)
        if any(size % WORD_BYTES for size in self.block_bytes):
            raise ValueError(f"blocks of {self.block_bytes} bytes are not whole words")

    def aligned(self, piece_bytes: int) -> bool:
        """True if all pieces start and end at multiples of 16 bytes."""
        return not any(size % _ALIGNED_BYTES for size in (piece_bytes, *self.block_bytes))


class DividedBlocks:
    """The blocks of a worker of several devices, each of which has its heads of them. On a link they are
    whole: kernels of `device`, the first one, gather and scatter them, and reach the others' memory."""

    def __init__(self, device: LinkDevice, heads: Sequence[HeadMoves]) -> None:
        """`heads`: of each cache group."""
        self.device = device
        self.heads = tuple(heads)
        self.block_bytes = tuple(each.block_bytes for each in heads)

    def aligned(self, piece_bytes: int) -> bool:
        """True if all runs of heads, and all pieces, start and end at multiples of 16 bytes."""
        return all(each.aligned(piece_bytes) for each in self.heads)


LinkBlocks = DeviceBlocks | DividedBlocks
"""The blocks of a worker, as its links use them."""


class DeviceSink:
    """The sink into which a receiver puts bytes that arrive in device memory."""

    def __init__(
        self,
        blocks: LinkBlocks,
        place: Callable[[int, int, int], int],
        *,
        steps_run: Callable[[], bool] = lambda: False,
        window_pieces: int = WINDOW_PIECES,
        piece_bytes: int | None = None,
    ) -> None:
        """`place(transfer, group, ordinal)`: the block that a transfer's ticket reserved as the `ordinal`-th
        of a group. `steps_run`: whether decode steps run on the device now, and moves must leave most of it
        to them."""
        self.blocks = blocks
        self.place = place
        self.steps_run = steps_run
        self.window_pieces = window_pieces
        self.piece_bytes = piece_bytes if piece_bytes is not None else default_piece_bytes(blocks.block_bytes)
