"""Gather and scatter: runs of words between blocks and staging, with checksums in the same pass.

    blocks ──gather──▶ staging (a window of pieces, contiguous) ──wire──▶ staging ──scatter──▶ blocks

A *run* is a number of 32-bit words that are contiguous on both sides. Blocks of equal layout have one run per
piece; where the two sides split heads differently (`kvtransfer.device.resplit`) a piece has several. The sum
covers what is on the wire: the words that gather writes, or that scatter reads, at their places in the piece.
So the result, with `piece_checksums`, is `PieceChecksum`'s of the piece's bytes.

Scatter writes while it sums: a piece that turns out corrupt has been written by then, into blocks that the
ticket reserved and no slot has read; its transfer fails, and the blocks are reused. Only a piece whose place
its receiver expects may be scattered.

A GPU runs `kvtransfer.device.kernels.move_runs`, a CPU the reference here; both give the same bytes and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from kvtransfer.device.kernels.move_plan import WORD_BYTES, WireSide
from kvtransfer.protocol.checksum import multipliers, place_sum

_MASK = (1 << 64) - 1


class Conversion(Enum):
    """Conversion of a word's two halves; rounds to nearest even, and overflows to infinity."""

    NONE = 0
    BFLOAT16_TO_FLOAT16 = 1
    FLOAT16_TO_BFLOAT16 = 2


@dataclass(frozen=True, slots=True)
class Run:
    """`length` words from `source` to `destination`, offsets in words of the two tensors. They are words
    `place` and following of piece number `piece` of the move."""

    source: int
    destination: int
    length: int
    piece: int
    place: int


class Runs:
    """The runs of one move, as a table on the device that moves them."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str) -> None:
        if not runs:
            raise ValueError("a move has at least one run")
        rows = [(run.source, run.destination, run.length, run.piece, run.place) for run in runs]
        self.table = torch.tensor(rows, dtype=torch.int64).to(device)
        self.longest = max(run.length for run in runs)
        self.pieces = 1 + max(run.piece for run in runs)
        # Conversion keeps a piece's length: both formats have 16 bits.
        self.words = [0] * self.pieces
        for run in runs:
            self.words[run.piece] += run.length


def words_of(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as flat int32 words; ValueError where it is not a whole number of
    words."""
    if not tensor.is_contiguous() or tensor.nbytes % WORD_BYTES:
        raise ValueError(f"{tensor.nbytes} bytes cannot be moved by words of {WORD_BYTES}")
    return tensor.view(-1).view(torch.uint8).view(torch.int32)


def move(
    source: Tensor,
    destination: Tensor,
    runs: Runs,
    travels: WireSide,
    conversion: Conversion = Conversion.NONE,
) -> Tensor:
    """Moves all runs between two tensors of `words_of`; returns the sums of the pieces' words, int64
    [pieces], mod 2^64. Runs must not overlap on either side. On a GPU it only enqueues, on the current
    stream."""
    sums = torch.zeros(runs.pieces, dtype=torch.int64, device=source.device)
    if source.device.type == "cpu":
        _move(source, destination, runs, travels, conversion, sums)
    else:
        on_gpu(source, destination, runs, travels, conversion, sums)
    return sums


def on_gpu(
    source: Tensor, destination: Tensor, runs: Runs, travels: WireSide, conversion: Conversion, sums: Tensor
) -> None:
    """`move` by the Triton kernel, which is imported when first needed; adds to `sums`."""
    from kvtransfer.device.kernels.move_runs import move_runs

    move_runs(
        source, destination, runs.table, runs.longest, sums,
        convert=conversion is not Conversion.NONE,
        from_bfloat=conversion is Conversion.BFLOAT16_TO_FLOAT16,
        sum_source=travels is WireSide.SOURCE,
    )  # fmt: skip


def move_rows(
    source: Tensor, destination: Tensor | None, rows: Tensor, longest: int, parts: Tensor, *, aligned: bool
) -> None:
    """Moves the rows of one piece, a run each, between two tensors of `words_of`, or only reads them where
    there is no destination. `parts`, int64 [SUM_PARTS], add up to the piece's sum mod 2^64 afterwards.

    rows: int64 [n, ROW_WORDS], the fields of `Run`, n at most SUM_PARTS; the first row's `piece` is the
    sum's initial value. `longest`: words of the longest run. `aligned`: every offset and length is a
    multiple of 4 words. On a GPU it only enqueues, on the current stream; `parts` is then in host memory that
    the GPU can access.
    """
    if source.device.type == "cpu":
        parts.zero_()
        parts[0] = rows[0, 3]
        for begins, goes_to, length, _, place in rows.tolist():
            words = source[begins : begins + length]
            if destination is not None:
                destination[goes_to : goes_to + length] = words
            weights = torch.from_numpy(multipliers(place + length).view(np.int64))[place:]
            parts[0] += ((words.long() & 0xFFFFFFFF) * weights).sum()
        return
    from kvtransfer.device.kernels.move_runs import move_piece

    move_piece(source, destination, rows, longest, parts, aligned=aligned)


def _move(
    source: Tensor, destination: Tensor, runs: Runs, travels: WireSide, conversion: Conversion, sums: Tensor
) -> None:
    """The reference of the kernel, run by run."""
    weights = torch.from_numpy(multipliers(max(runs.words)).view(np.int64))
    for begins, goes_to, length, piece, place in runs.table.tolist():
        words = source[begins : begins + length]
        moved = _converted(words, conversion)
        destination[goes_to : goes_to + length] = moved
        wire = words if travels is WireSide.SOURCE else moved
        products = (wire.long() & 0xFFFFFFFF) * weights[place : place + length]
        sums[piece] += products.sum()


def _converted(words: Tensor, conversion: Conversion) -> Tensor:
    match conversion:
        case Conversion.NONE:
            return words
        case Conversion.BFLOAT16_TO_FLOAT16:
            return words.view(torch.bfloat16).to(torch.float16).view(torch.int32)
        case Conversion.FLOAT16_TO_BFLOAT16:
            return words.view(torch.float16).to(torch.bfloat16).view(torch.int32)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a piece, which `PieceChecksum` covers besides its bytes."""

    transfer: int
    group: int
    ordinal: int
    offset: int
    length: int


def piece_checksums(sums: Tensor, places: Sequence[Place]) -> list[int]:
    """The checksums of pieces, in [0, 2^64), from `move`'s sums; synchronizes with the device."""
    return [
        (place_sum(at.transfer, at.group, at.ordinal, at.offset, at.length) + found) & _MASK
        for at, found in zip(places, sums.tolist(), strict=True)
    ]


def whole_pieces(
    blocks: Sequence[int], block_bytes: int, piece_bytes: int, staging: Sequence[int]
) -> list[Run]:
    """The runs of a gather of these blocks, in order, one per piece; piece n goes to index staging[n].
    `reversed_runs` makes them the scatter's. ValueError where a size is not a whole number of words, or the
    number of staging indices is not that of the pieces."""
    if block_bytes % WORD_BYTES or piece_bytes % WORD_BYTES:
        raise ValueError(f"blocks of {block_bytes} and pieces of {piece_bytes} bytes are not whole words")
    cuts = [(block, offset) for block in blocks for offset in range(0, block_bytes, piece_bytes)]
    return [
        Run(
            source=(block * block_bytes + offset) // WORD_BYTES,
            destination=index * piece_bytes // WORD_BYTES,
            length=min(piece_bytes, block_bytes - offset) // WORD_BYTES,
            piece=number,
            place=0,
        )
        for number, ((block, offset), index) in enumerate(zip(cuts, staging, strict=True))
    ]


def reversed_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs that move the same words back."""
    return [Run(run.destination, run.source, run.length, run.piece, run.place) for run in runs]
