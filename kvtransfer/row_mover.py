"""Moves pieces between blocks and staging, a kernel each, whose launch costs the host microseconds: it is
compiled beforehand, and its arguments are addresses alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from baton.device.link_device import Kernel, Line
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.frames import Piece
from kvtransfer.geometry import MOST_BLOCKS
from kvtransfer.move_plan import ROW_WORDS, WORD_BYTES, Travels

if TYPE_CHECKING:
    from torch import Tensor

_ROW = struct.Struct("<5qQ")


class Prepared(NamedTuple):
    """A piece whose rows the device has: where they begin in the table, how many there are, the longest's
    words."""

    group: int
    place: int
    rows: int
    longest: int


class RowMover:
    """Of one link. Rows of a piece lie at its staging index; they are filled again when its credit is
    home."""

    def __init__(
        self, blocks: DeviceBlocks, staging: Tensor, pieces: int, piece_bytes: int, travels: Travels
    ) -> None:
        """`staging`: all of it. Gathers (`Travels.DESTINATION`) or scatters."""
        from kvtransfer.moving import words_of

        device = blocks.device
        self._blocks = blocks
        self._staging, self._staging_at = words_of(staging), staging.data_ptr()
        self._piece_words = piece_bytes // WORD_BYTES
        self._travels = travels
        self._aligned = blocks.aligned(piece_bytes)
        most = min(MOST_BLOCKS, max(1, piece_bytes // min(blocks.block_bytes)))
        self._index_bytes = most * _ROW.size
        self._host = device.on_host(pieces * most, ROW_WORDS)
        self._there = device.table(pieces * most, ROW_WORDS)
        self._bytes = self._host.numpy().data.cast("B")
        self._at_host, self._at_device = self._host.data_ptr(), self._there.data_ptr()
        self._pools = tuple(words.data_ptr() for words in blocks.words)
        self._kernel: Kernel | None = None
        if staging.is_cuda:
            from kvtransfer.gpu.move_runs import prepared, programs

            self._programs = programs
            self._kernel = prepared(staging.device, travels is Travels.SOURCE, self._aligned)

    def prepare(self, line: Line, piece: Piece, blocks: Sequence[int], begins: int | None = None) -> Prepared:
        """Says on a line which rows a piece of these blocks has; its sum begins with `begins`, or the piece's
        checksum."""
        longest = self._fill(piece, blocks, piece.checksum if begins is None else begins)
        place, size = piece.staging * self._index_bytes, len(blocks) * _ROW.size
        line.copy(self._at_device + place, self._at_host + place, size)
        return Prepared(piece.group, place, len(blocks), longest)

    def move(self, line: Line, prepared: Prepared, *, beside_steps: bool = False) -> int:
        """Says on the same line that it is to be moved; where on the device its sum will be."""
        group, place, count, longest = prepared
        rows = self._at_device + place
        if self._kernel is not None:
            pool, staging = self._pools[group], self._staging_at
            ends = (staging, pool) if self._travels is Travels.SOURCE else (pool, staging)
            grid = count, self._programs(count, longest, beside_steps=beside_steps)
            line.launch(self._kernel, grid, (*ends, rows, rows))
        else:
            first = place // _ROW.size
            self._run(line, group, self._there[first : first + count], longest)
        return rows + _ROW.size - 8

    def _fill(self, piece: Piece, blocks: Sequence[int], begins: int) -> int:
        """A row a block, all of whose sums go to the first row's end; the longest's words."""
        size = self._blocks.block_words[piece.group]
        words = min(size, piece.length // WORD_BYTES)
        staging, at = piece.staging * self._piece_words, piece.staging * self._index_bytes
        for n, block in enumerate(blocks):
            ends = block * size + piece.offset // WORD_BYTES, staging + n * words
            source, destination = ends if self._travels is Travels.DESTINATION else ends[::-1]
            _ROW.pack_into(self._bytes, at, source, destination, words, ROW_WORDS - 1, n * words, begins)
            at += _ROW.size
        return words

    def _run(self, line: Line, group: int, rows: Tensor, longest: int) -> None:
        pool, staging, travels = self._blocks.words[group], self._staging, self._travels
        from kvtransfer.moving import move_rows

        source, destination = (pool, staging) if travels is Travels.DESTINATION else (staging, pool)
        line.run(lambda: move_rows(source, destination, rows, longest, travels, aligned=self._aligned))


def warm(blocks: DeviceBlocks) -> None:
    """Compiles what moves them on a GPU, where that takes its time: not while somebody waits for a
    transfer."""
    from kvtransfer.gpu.move_runs import prepared

    for travels in Travels:
        aligned = blocks.aligned(blocks.largest_piece())
        prepared(blocks.device.tensors_on, travels is Travels.SOURCE, aligned)
