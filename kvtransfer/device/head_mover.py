"""Moves pieces between staging and the heads that each of several devices has of their blocks, with one
kernel each, of the first device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from baton.device.heads.moves import WORD_BYTES
from baton.device.heads.table import HEADER_WORDS, table_words, write_table
from baton.device.streams.link_device import Kernel, LinkStream
from kvtransfer.device.blocks import DividedBlocks
from kvtransfer.device.kernels.move_plan import SUM_PARTS, Direction
from kvtransfer.device.mover import Prepared
from kvtransfer.device.piece_memory import OpenedWindow, PieceMemory, PieceSums
from kvtransfer.device.reference import words_of, words_sum
from kvtransfer.protocol.checksum import TILE_SEED
from kvtransfer.protocol.frames import Piece
from kvtransfer.protocol.piece_geometry import MAX_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor


class HeadMover:
    """A `PieceMover`: gathers pieces into staging, or scatters them. The table of a piece, in host memory,
    lies at its staging index, and is overwritten once its credit was returned."""

    def __init__(
        self, blocks: DividedBlocks, pieces: int, piece_bytes: int, direction: Direction,
        *, sums: PieceSums | PieceMemory, staging: PieceMemory | OpenedWindow,
    ) -> None:  # fmt: skip
        """`sums`: where a piece's partial sums are written. RuntimeError where a GPU's kernel cannot be
        launched without Triton's launcher."""
        self._heads = blocks.heads
        self._gathers = direction is Direction.GATHER
        self._sums = sums
        self._staging = staging
        # A scatter copies the sums that travel before a piece.
        self._header = not self._gathers and staging.head > 0
        most = min(MAX_BLOCKS, max(1, piece_bytes // min(blocks.block_bytes)))
        self._tables = blocks.device.host_zeros(pieces, table_words(most))
        self._table_bytes = self._tables[0].nbytes
        self._bytes = self._tables.numpy().data.cast("B")
        self._address = self._tables.data_ptr()
        self._kernel: Kernel | None = None
        if blocks.device.tensors_on.type == "cuda":
            aligned = blocks.aligned(piece_bytes)
            self._kernel = link_kernel(blocks.device.tensors_on, aligned, self._gathers, self._header)

    def prepare(self, piece: Piece, blocks: Sequence[int], place: int) -> Prepared:
        """Writes the table of a piece. Its sum starts with `place`, the checksum of its place."""
        heads = self._heads[piece.group]
        length = min(heads.block_bytes, piece.length)
        words = range(piece.offset // WORD_BYTES, (piece.offset + length) // WORD_BYTES)
        first = piece.staging * self._staging.stride // WORD_BYTES
        places = range(first, first + len(blocks) * len(words), len(words))
        at = piece.staging * self._table_bytes
        write_table(self._bytes, at, blocks, words, places, len(heads.runs), place)
        return Prepared(piece.group, piece.staging, len(blocks), len(words))

    def clear(self, prepared: Prepared) -> None:
        """Empties a piece's table: a move that starts afterwards moves nothing, one that runs at most what it
        would have."""
        self._tables[prepared.staging, 0] = 0

    def move(self, stream: LinkStream, prepared: Prepared, *, beside_steps: bool = False) -> None:
        """Enqueues the move; `sums` has the piece's sum afterwards. `beside_steps`: leaves most of the
        device to decode steps."""
        heads, index = self._heads[prepared.group], prepared.staging
        if self._kernel is None:
            table, parts = self._tables[index], self._sums.parts(index)
            whole = words_of(self._staging.tensor)
            stream.run(lambda: self._run(prepared, whole, table, parts))
            return
        from baton.device.heads.kernel import programs

        longest = min(heads.longest, prepared.longest)
        runs = prepared.rows * len(heads.runs) if longest else 1
        grid = programs(runs, longest, beside_steps=beside_steps)
        table_address = self._address + index * self._table_bytes
        ends = heads.address, self._staging.first
        sums = self._sums.address_of(index)
        stream.launch(self._kernel, grid, (*ends, table_address, heads.runs.data_ptr(), sums))

    def _run(self, prepared: Prepared, whole: Tensor, table: Tensor, parts: Tensor) -> None:
        self._heads[prepared.group].move(whole, table, gathers=self._gathers)
        blocks, begin, end, initial = table[:4].tolist()
        first = int(table[HEADER_WORDS + 1])
        parts.zero_()
        parts[0] = initial
        if blocks:
            parts[0] += words_sum(whole[first : first + blocks * (end - begin)], 0)
        if self._header:
            assert isinstance(self._sums, PieceSums)
            assert isinstance(self._staging, PieceMemory)
            self._sums.reported_parts(prepared.staging).copy_(self._staging.parts(prepared.staging))


def link_kernel(device: torch.device, aligned: bool, gathers: bool, header: bool) -> Kernel:
    """The kernel of a GPU that moves pieces, which it compiles at first. RuntimeError where it cannot be
    launched without Triton's launcher."""
    from baton.device.heads.kernel import HeadMove, prepared_heads

    kernel = prepared_heads(device, HeadMove(aligned, gathers, SUM_PARTS, TILE_SEED, header))
    if kernel is None:
        raise RuntimeError("kernels between devices need a direct launch, which this version of Triton lacks")
    return kernel
