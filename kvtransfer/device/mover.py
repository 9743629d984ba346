"""Moves pieces between blocks and staging, a kernel each, whose launch costs the host microseconds: it is
compiled beforehand, and its arguments are addresses alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from baton.device.link_device import Kernel, LinkStream
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.kernels.move_plan import ROW_WORDS, SUM_PARTS, WORD_BYTES, Act
from kvtransfer.device.piece_sums import PieceSums, SumPlaces
from kvtransfer.protocol.frames import Piece
from kvtransfer.protocol.piece_geometry import MOST_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor

    from baton.device.link_device import LinkDevice
    from kvtransfer.device.piece_memory import PieceMemory

_ROW = struct.Struct("<3qQq")
_LENGTH_AT = 2


class Prepared(NamedTuple):
    """A piece whose rows are there: its staging index, how many there are, the longest's words."""

    group: int
    staging: int
    rows: int
    longest: int


NOTHING = Prepared(group=0, staging=0, rows=1, longest=0)
"""As long as nothing was prepared, rows are empty."""


class RowMover:
    """Of one link. Rows and sums of a piece lie at its staging index, rows in the host's memory; they are
    written again when its credit is home."""

    def __init__(
        self, blocks: DeviceBlocks, pieces: int, piece_bytes: int, act: Act,
        *, sums: SumPlaces, staging: PieceMemory | None = None,
    ) -> None:  # fmt: skip
        """`staging`: unless words are only read."""
        from kvtransfer.device.reference import words_of

        self._blocks = blocks
        self._act = act
        self._sums = sums
        self._memory = staging
        self._staging = None if staging is None else words_of(staging.tensor)
        self._staging_at = 0 if staging is None else staging.tensor.data_ptr()
        self._stride = 0 if staging is None else staging.stride // WORD_BYTES
        self._aligned = blocks.aligned(piece_bytes)
        # What travels before a piece is copied when it is moved.
        self._heads = act is Act.SCATTER and staging is not None and staging.head > 0
        most = min(MOST_BLOCKS, max(1, piece_bytes // min(blocks.block_bytes)))
        shape = pieces, -(-most * ROW_WORDS // 2) * 2  # each index begins at a multiple of 16 bytes
        self._rows = blocks.device.host_zeros(*shape)
        self._index_bytes = self._rows[0].nbytes
        self._bytes = self._rows.numpy().data.cast("B")
        self._rows_at = self._rows.data_ptr()
        self._pools = blocks.addresses
        self._kernel: Kernel | None = None
        if blocks.device.tensors_on.type == "cuda":
            from kvtransfer.device.kernels.move_runs import prepared, programs

            self._programs = programs
            self._kernel = prepared(blocks.device.tensors_on, self._aligned, act is not Act.READ, self._heads)

    def prepare(self, piece: Piece, blocks: Sequence[int], place: int) -> Prepared:
        """Writes the rows of a piece of these blocks: one each. Its sum begins with that of its place: what
        an index had before, or nobody has written, is never right."""
        size = self._blocks.block_words[piece.group]
        words = min(size, piece.length // WORD_BYTES)
        staging, at = piece.staging * self._stride, piece.staging * self._index_bytes
        for n, block in enumerate(blocks):
            here, there = block * size + piece.offset // WORD_BYTES, staging + n * words
            source, destination = (there, here) if self._act is Act.SCATTER else (here, there)
            _ROW.pack_into(self._bytes, at, source, destination, words, place, n * words)
            at += _ROW.size
        return Prepared(piece.group, piece.staging, len(blocks), words)

    def empty(self, prepared: Prepared) -> None:
        """A move that begins after this moves nothing; one that runs moves what it did, or less of it."""
        self._rows[prepared.staging, _LENGTH_AT : prepared.rows * ROW_WORDS : ROW_WORDS] = 0

    def move(self, stream: LinkStream, prepared: Prepared, *, beside_steps: bool = False) -> None:
        """Says on a line that it is to be moved; `sums` has its sum then."""
        group, index, count, longest = prepared
        if self._kernel is not None:
            pool, staging = self._pools[group], self._staging_at
            ends = (staging, pool) if self._act is Act.SCATTER else (pool, staging)
            grid = count, self._programs(count, longest, beside_steps=beside_steps)
            addresses = *ends, self._rows_at + index * self._index_bytes, self._sums.place(index)
            stream.launch(self._kernel, grid, addresses)
        else:
            rows = self._rows[index, : count * ROW_WORDS].view(count, ROW_WORDS)
            self._run(stream, group, rows, longest, index)

    def _run(self, stream: LinkStream, group: int, rows: Tensor, longest: int, index: int) -> None:
        from kvtransfer.device.reference import move_rows

        pool, staging = self._blocks.words[group], self._staging
        source, destination = (pool, staging) if self._act is not Act.SCATTER else (staging, pool)
        assert source is not None, "who scatters has staging"
        parts = self._sums.parts(index)

        def run() -> None:
            move_rows(source, destination, rows, longest, parts, aligned=self._aligned)
            if self._heads:
                assert isinstance(self._sums, PieceSums)
                assert self._memory is not None
                self._sums.said_parts(index).copy_(self._memory.parts(index), non_blocking=True)

        stream.run(run)


def sums_of(device: LinkDevice, pieces: int, *, heads: bool = False) -> PieceSums:
    """In memory of this process's own; `heads`: of pieces before which their sender's travel."""
    parts = device.host_zeros(pieces, 2 * SUM_PARTS if heads else SUM_PARTS)
    return PieceSums(parts.numpy().view(np.uint64), parts.data_ptr())


def warm(blocks: DeviceBlocks) -> None:
    """Compiles what moves them on a GPU, where that takes its time: not while somebody waits for a
    transfer."""
    from kvtransfer.device.kernels.move_runs import prepared

    aligned = blocks.aligned(blocks.largest_piece())
    for stores, head in ((False, False), (True, False), (True, True)):
        prepared(blocks.device.tensors_on, aligned, stores, head)
