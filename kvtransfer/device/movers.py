"""Movers of pieces between staging and blocks, by where the blocks are: on one device, or divided among
several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.device.streams.link_device import LinkStream
from kvtransfer.device.blocks import DividedBlocks, LinkBlocks, default_piece_bytes
from kvtransfer.device.kernels.move_plan import Direction
from kvtransfer.device.mover import Prepared, RowMover
from kvtransfer.device.piece_memory import OpenedWindow, PieceMemory, PieceSums
from kvtransfer.protocol.frames import Piece


class PieceMover(Protocol):
    """Moves the pieces of one link; their sums are known afterwards."""

    def prepare(self, piece: Piece, blocks: Sequence[int], place: int) -> Prepared:
        """Writes down what is to be moved. Its sum starts with `place`, the checksum of the piece's place."""

    def clear(self, prepared: Prepared) -> None:
        """Makes a move that starts afterwards move nothing."""

    def move(self, stream: LinkStream, prepared: Prepared, *, beside_steps: bool = False) -> None:
        """Enqueues the move. `beside_steps`: leaves most of the device to decode steps."""


def gatherer(
    blocks: LinkBlocks, pieces: int, piece_bytes: int, sums: PieceSums | PieceMemory,
    staging: PieceMemory | OpenedWindow,
) -> PieceMover:  # fmt: skip
    """A mover from blocks into staging. OSError, RuntimeError where the device fails."""
    if isinstance(blocks, DividedBlocks):
        from kvtransfer.device.head_mover import HeadMover

        return HeadMover(blocks, pieces, piece_bytes, Direction.GATHER, sums=sums, staging=staging)
    assert isinstance(staging, PieceMemory), "blocks of one device are copied into a receiver's window"
    return RowMover(blocks, pieces, piece_bytes, Direction.GATHER, sums=sums, staging=staging)


def scatterer(
    blocks: LinkBlocks, pieces: int, piece_bytes: int, sums: PieceSums, staging: PieceMemory
) -> PieceMover:
    """A mover from staging into blocks. OSError, RuntimeError where the device fails."""
    if isinstance(blocks, DividedBlocks):
        from kvtransfer.device.head_mover import HeadMover

        return HeadMover(blocks, pieces, piece_bytes, Direction.SCATTER, sums=sums, staging=staging)
    return RowMover(blocks, pieces, piece_bytes, Direction.SCATTER, sums=sums, staging=staging)


def warm(blocks: LinkBlocks) -> None:
    """Compiles the kernels that move these blocks, which takes seconds on a GPU: call it at start-up.
    RuntimeError where those of several devices cannot be launched as links do."""
    place, aligned = blocks.device.tensors_on, blocks.aligned(default_piece_bytes(blocks.block_bytes))
    if isinstance(blocks, DividedBlocks):
        from kvtransfer.device.head_mover import link_kernel

        for gathers, header in ((True, False), (False, False), (False, True)):
            link_kernel(place, aligned, gathers, header)
        return
    from kvtransfer.device.kernels.move_runs import prepared

    for stores, head in ((False, False), (True, False), (True, True)):
        prepared(place, aligned, stores, head)
