"""Tracks the bytes of a transfer that are expected, and those that have arrived."""

from __future__ import annotations

from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import TicketBody
from kvtransfer.protocol.frames import Piece
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.protocol.ticket import resident_counts


class ExpectedPieces:
    """Tracks every piece of the expected blocks: of each cache group, blocks `resident_counts` to
    `block_counts`."""

    def __init__(self, block_counts: Sequence[int], resident: Sequence[int], groups: int) -> None:
        """ValueError where there is not one count for each cache group."""
        if not len(block_counts) == len(resident) == groups:
            raise ValueError(
                f"{len(block_counts)} and {len(resident)} block counts for {groups} cache groups"
            )
        self.block_counts = tuple(block_counts)
        self.resident_counts = tuple(resident)
        self.sent_counts = tuple(map(int.__sub__, block_counts, resident))
        self.missing = 0
        self._geometry: PieceGeometry | None = None
        self._arrived: list[bytearray] = []

    def cut(self, geometry: PieceGeometry) -> None:
        """Cuts the blocks as one link does; a transfer's pieces come over one link."""
        if self._geometry is geometry:
            return
        assert self._geometry is None, "pieces of a transfer come over one link"
        self._geometry = geometry
        # One flag for each piece, block after block.
        self._arrived = [
            bytearray(count * geometry.pieces_per_block(group))
            for group, count in enumerate(self.sent_counts)
        ]
        self.missing = sum(map(len, self._arrived))

    def check_counts(self, sent: Sequence[int], body: TicketBody) -> None:
        """Checks that the sender's counts and those of its ticket are as expected. Raises
        BatonError(INTERNAL) otherwise."""
        counts = (tuple(sent), tuple(body.block_counts), resident_counts(body))
        if counts != (self.sent_counts, self.block_counts, self.resident_counts):
            raise BatonError(
                ErrorKind.INTERNAL,
                f"block counts differ: {list(sent)} sent, {list(body.block_counts)} in the ticket, "
                f"{list(self.block_counts)} expected, {list(self.resident_counts)} of them resident",
            )

    def expects(self, piece: Piece) -> bool:
        """Returns whether this is a piece of expected blocks."""
        return (
            self._cut_geometry.is_piece(piece.group, piece.offset, piece.length)
            and self.resident_counts[piece.group] <= piece.ordinal
            and piece.ordinal + self.blocks_of(piece) <= self.block_counts[piece.group]
        )

    def blocks_of(self, piece: Piece) -> int:
        """Returns how many blocks the piece belongs to."""
        return self._cut_geometry.blocks_of(piece.group, piece.length)

    def has_any(self, piece: Piece) -> bool:
        """Returns whether any part of an expected piece was marked before."""
        first = self._flag(piece)
        return any(self._arrived[piece.group][first : first + self.blocks_of(piece)])

    def mark(self, piece: Piece) -> int:
        """Marks an expected piece as arrived, once it is scattered or about to be; returns how many blocks it
        completes."""
        flags, flag, blocks = self._arrived[piece.group], self._flag(piece), self.blocks_of(piece)
        flags[flag : flag + blocks] = b"\1" * blocks
        self.missing -= blocks
        if blocks > 1:
            return blocks
        first, count = self._first_flag(piece), self._cut_geometry.pieces_per_block(piece.group)
        return int(all(flags[first : first + count]))

    def _flag(self, piece: Piece) -> int:
        return self._first_flag(piece) + piece.offset // self._cut_geometry.piece_bytes

    def _first_flag(self, piece: Piece) -> int:
        """Returns the first flag of the piece's block."""
        expected = piece.ordinal - self.resident_counts[piece.group]
        return expected * self._cut_geometry.pieces_per_block(piece.group)

    @property
    def _cut_geometry(self) -> PieceGeometry:
        assert self._geometry is not None, "pieces are accepted only once the transfer is bound to a link"
        return self._geometry
