"""Gather and scatter: runs of words between blocks and staging, with checksums in the same pass.

    blocks ──gather──▶ staging (a window of pieces, contiguous) ──wire──▶ staging ──scatter──▶ blocks

A *run* is a number of 32-bit words that are contiguous on both sides. A piece has one for each of its blocks,
and more where several devices have their heads (`kvtransfer.device.head_mover`). The sum covers the words at
their places in the piece: added to `place_sum` it is `PieceChecksum`'s of the piece's bytes.

Scatter writes while it sums: a piece that turns out corrupt has been written by then, into blocks that the
ticket reserved and no slot has read; its transfer fails, and the blocks are reused. Only a piece whose place
its receiver expects may be scattered.

A GPU runs `kvtransfer.device.kernels.move_runs`, a CPU the reference here; both give the same bytes and sums.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvtransfer.device.kernels.move_plan import WORD_BYTES
from kvtransfer.protocol.checksum import multipliers


def words_of(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as flat int32 words; ValueError where it is not a whole number of
    words."""
    if not tensor.is_contiguous() or tensor.nbytes % WORD_BYTES:
        raise ValueError(f"{tensor.nbytes} bytes cannot be moved by words of {WORD_BYTES}")
    return tensor.view(-1).view(torch.uint8).view(torch.int32)


def move_rows(
    source: Tensor, destination: Tensor | None, rows: Tensor, longest: int, parts: Tensor, *, aligned: bool
) -> None:
    """Moves the rows of one piece, a run each, between two tensors of `words_of`, or only reads them where
    there is no destination. `parts`, int64 [SUM_PARTS], add up to the piece's sum mod 2^64 afterwards.

    rows: int64 [n, ROW_WORDS]: source and destination, offsets in words of the two; length; the sum's initial
    value in the first row; and the run's first word in the piece. n is at most SUM_PARTS. `longest`: words of
    the longest run. `aligned`: every offset and length is a multiple of 4 words. On a GPU it only enqueues,
    on the current stream; `parts` is then in host memory that the GPU can access.
    """
    if source.device.type == "cpu":
        parts.zero_()
        parts[0] = rows[0, 3]
        for begins, goes_to, length, _, place in rows.tolist():
            words = source[begins : begins + length]
            if destination is not None:
                destination[goes_to : goes_to + length] = words
            parts[0] += words_sum(words, place)
        return
    from kvtransfer.device.kernels.move_runs import move_piece

    move_piece(source, destination, rows, longest, parts, aligned=aligned)


def words_sum(words: Tensor, place: int) -> Tensor:
    """The weighted sum of a piece's words from number `place` on: int64, mod 2^64. words: flat int32 on a
    CPU."""
    weights = torch.from_numpy(multipliers(place + len(words)).view(np.int64))[place:]
    return ((words.long() & 0xFFFFFFFF) * weights).sum()
