"""Pieces that one kernel moves: of one cache group, in consecutive staging indices."""

from __future__ import annotations

from typing import NamedTuple

from kvtransfer.frames import Piece


class Move(NamedTuple):
    """A piece, and the block of ours that its bytes come from or go to; `whole`: the block is, with it."""

    piece: Piece
    block: int
    whole: bool = False


def batches(moves: list[Move], piece_bytes: int, most_bytes: int) -> list[list[Move]]:
    """Cuts them, in their order, into what one kernel and one copy take: at most `most_bytes`, or one piece.
    A shorter piece is the last of its batch, so that the batch is one run of bytes in staging."""
    found: list[list[Move]] = []
    size = 0
    for move in moves:
        if found and size < most_bytes and _follows(found[-1][-1].piece, move.piece, piece_bytes):
            found[-1].append(move)
            size += piece_bytes
        else:
            found.append([move])
            size = piece_bytes
    return found


def _follows(before: Piece, after: Piece, piece_bytes: int) -> bool:
    return (
        after.staging == before.staging + 1 and after.group == before.group and before.length == piece_bytes
    )
