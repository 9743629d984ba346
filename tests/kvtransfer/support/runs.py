"""Runs of whole blocks, and the checksums of their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvtransfer.device.kernels.move_plan import WORD_BYTES
from kvtransfer.device.reference import Run
from kvtransfer.protocol.checksum import place_sum

_MASK = (1 << 64) - 1


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
