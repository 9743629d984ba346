"""Moves pieces between blocks and staging with one kernel each. The kernel is compiled beforehand and takes
addresses alone, so a launch costs the host microseconds."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from baton.device.streams.link_device import Kernel, LinkStream
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.kernels.move_plan import ROW_WORDS, SUM_PARTS, WORD_BYTES, Direction
from kvtransfer.device.piece_memory import PieceMemory, PieceSums
from kvtransfer.protocol.frames import Piece
from kvtransfer.protocol.piece_geometry import MAX_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor

    from baton.device.streams.link_device import LinkDevice

_ROW = struct.Struct("<3qQq")
_LENGTH_COLUMN = 2


class Prepared(NamedTuple):
    """A piece whose rows are written: its staging index, how many rows there are, words of the longest."""

    group: int
    staging: int
    rows: int
    longest: int


NOTHING = Prepared(group=0, staging=0, rows=1, longest=0)
"""A piece of no words; valid for a mover that has prepared nothing."""


class RowMover:
    """Moves the pieces of one link. The rows of a piece, in host memory, and its sums lie at its staging
    index, and are overwritten once its credit was returned."""

    def __init__(
        self, blocks: DeviceBlocks, pieces: int, piece_bytes: int, direction: Direction,
        *, sums: PieceSums | PieceMemory, staging: PieceMemory | None = None,
    ) -> None:  # fmt: skip
        """`sums`: where a piece's partial sums are written. `staging`: unless words are only read."""
        from kvtransfer.device.reference import words_of

        self._blocks = blocks
        self._direction = direction
        self._sums = sums
        self._memory = staging
        self._staging = None if staging is None else words_of(staging.tensor)
        self._staging_address = 0 if staging is None else staging.tensor.data_ptr()
        self._stride = 0 if staging is None else staging.stride // WORD_BYTES
        self._aligned = blocks.aligned(piece_bytes)
        # A scatter copies the sums that travel before a piece.
        self._heads = direction is Direction.SCATTER and staging is not None and staging.head > 0
        most = min(MAX_BLOCKS, max(1, piece_bytes // min(blocks.block_bytes)))
        shape = pieces, -(-most * ROW_WORDS // 2) * 2  # each index starts at a multiple of 16 bytes
        self._rows = blocks.device.host_zeros(*shape)
        self._index_bytes = self._rows[0].nbytes
        self._bytes = self._rows.numpy().data.cast("B")
        self._rows_address = self._rows.data_ptr()
        self._pools = blocks.addresses
        self._kernel: Kernel | None = None
        if blocks.device.tensors_on.type == "cuda":
            from kvtransfer.device.kernels.move_runs import prepared, programs

            self._programs = programs
            stores = direction is not Direction.READ
            self._kernel = prepared(blocks.device.tensors_on, self._aligned, stores, self._heads)

    def prepare(self, piece: Piece, blocks: Sequence[int], place: int) -> Prepared:
        """Writes the rows of a piece, one for each of its blocks. Its sum starts with `place`, the checksum
        of its place, so stale or unwritten contents of the index never pass for valid."""
        size = self._blocks.block_words[piece.group]
        words = min(size, piece.length // WORD_BYTES)
        staging, at = piece.staging * self._stride, piece.staging * self._index_bytes
        for n, block in enumerate(blocks):
            in_block, in_staging = block * size + piece.offset // WORD_BYTES, staging + n * words
            scatters = self._direction is Direction.SCATTER
            source, destination = (in_staging, in_block) if scatters else (in_block, in_staging)
            _ROW.pack_into(self._bytes, at, source, destination, words, place, n * words)
            at += _ROW.size
        return Prepared(piece.group, piece.staging, len(blocks), words)

    def clear(self, prepared: Prepared) -> None:
        """Empties a piece's rows: a move that starts afterwards moves nothing, one that runs at most what it
        would have."""
        self._rows[prepared.staging, _LENGTH_COLUMN : prepared.rows * ROW_WORDS : ROW_WORDS] = 0

    def move(self, stream: LinkStream, prepared: Prepared, *, beside_steps: bool = False) -> None:
        """Enqueues the move; `sums` has the piece's sum afterwards. `beside_steps`: leaves most of the
        device to decode steps."""
        group, index, count, longest = prepared
        if self._kernel is not None:
            pool, staging = self._pools[group], self._staging_address
            ends = (staging, pool) if self._direction is Direction.SCATTER else (pool, staging)
            grid = count, self._programs(count, longest, beside_steps=beside_steps)
            addresses = *ends, self._rows_address + index * self._index_bytes, self._sums.address_of(index)
            stream.launch(self._kernel, grid, addresses)
        else:
            rows = self._rows[index, : count * ROW_WORDS].view(count, ROW_WORDS)
            self._run(stream, group, rows, longest, index)

    def _run(self, stream: LinkStream, group: int, rows: Tensor, longest: int, index: int) -> None:
        from kvtransfer.device.reference import move_rows

        pool, staging = self._blocks.words[group], self._staging
        source, destination = (staging, pool) if self._direction is Direction.SCATTER else (pool, staging)
        assert source is not None, "a scatter has staging"
        parts = self._sums.parts(index)

        def run() -> None:
            move_rows(source, destination, rows, longest, parts, aligned=self._aligned)
            if self._heads:
                assert isinstance(self._sums, PieceSums)
                assert self._memory is not None
                self._sums.reported_parts(index).copy_(self._memory.parts(index), non_blocking=True)

        stream.run(run)


def host_sums(device: LinkDevice, pieces: int, *, heads: bool = False) -> PieceSums:
    """Sums in host memory that the device writes; `heads`: for pieces that their sender's sums precede."""
    parts = device.host_zeros(pieces, 2 * SUM_PARTS if heads else SUM_PARTS)
    return PieceSums(parts.numpy().view(np.uint64), parts.data_ptr())
