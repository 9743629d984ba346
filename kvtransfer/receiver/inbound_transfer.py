"""One expected transfer at the receiver: which of its bytes have arrived.

expected ──record with its ticket──▶ bound to a link ──commit──▶ committed ──acknowledge / refuse──▶ gone
    └────────────── forget, withdraw, link lost, bad checksum ───────────────────────────▶ gone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import Commit, Piece, Record
from kvtransfer.protocol.piece_geometry import Geometry
from kvtransfer.protocol.ticket import TicketSigner, resident_counts

if TYPE_CHECKING:
    from kvtransfer.receiver.link import ReceivingLink


class Incoming:
    """Counts every piece of every expected block, once each: of each cache group, blocks `resident_counts` to
    `block_counts`."""

    def __init__(
        self, transfer_id: int, block_counts: Sequence[int], resident_counts: Sequence[int], groups: int
    ) -> None:
        if not len(block_counts) == len(resident_counts) == groups:
            raise ValueError(
                f"{len(block_counts)} and {len(resident_counts)} block counts for {groups} cache groups"
            )
        self.transfer_id = transfer_id
        self.block_counts = tuple(block_counts)
        self.resident_counts = tuple(resident_counts)
        self.sent_counts = tuple(map(int.__sub__, block_counts, resident_counts))
        self.link: ReceivingLink | None = None
        self.paid: Paid | None = None  # once its ticket is here and right: before that nothing is taken
        self.arrived = False
        self.committed = False
        # Pieces that a device moves at this moment, and the record of the commit that waits for them.
        self.under_way = 0
        self.postponed: CommitRecord | None = None
        self._geometry: Geometry | None = None
        self._arrived: list[bytearray] = []
        self.missing_pieces = 0

    def cut(self, geometry: Geometry) -> None:
        """The pieces are those of the link that they come over; before anything else is asked of them."""
        if self._geometry is geometry:
            return
        assert self.link is None, "pieces of a transfer come over one link"
        self._geometry = geometry
        # One flag a piece, block after block.
        self._arrived = [
            bytearray(count * geometry.pieces_per_block(group))
            for group, count in enumerate(self.sent_counts)
        ]
        self.missing_pieces = sum(map(len, self._arrived))

    def compare(self, sent: Sequence[int], body: TicketBody) -> None:
        """BatonError(INTERNAL) unless the sender's count and its ticket are what is expected."""
        counts = (tuple(sent), tuple(body.block_counts), resident_counts(body))
        if counts != (self.sent_counts, self.block_counts, self.resident_counts):
            raise BatonError(
                ErrorKind.INTERNAL,
                f"block counts differ: {list(sent)} sent, {list(body.block_counts)} in the ticket, "
                f"{list(self.block_counts)} expected, {list(self.resident_counts)} of them held",
            )

    def expects(self, piece: Piece) -> bool:
        """Whether this piece is one of the expected blocks'."""
        return (
            self._cut.is_piece(piece.group, piece.offset, piece.length)
            and self.resident_counts[piece.group] <= piece.ordinal
            and piece.ordinal + self.blocks_of(piece) <= self.block_counts[piece.group]
        )

    def blocks_of(self, piece: Piece) -> int:
        return self._cut.blocks_of(piece.group, piece.length)

    def has(self, piece: Piece) -> bool:
        """Any of it."""
        first = self._flag(piece)
        return any(self._arrived[piece.group][first : first + self.blocks_of(piece)])

    def mark(self, piece: Piece) -> int:
        """Notes an expected piece, once it is scattered or about to be; how many blocks it made whole."""
        flags, flag, blocks = self._arrived[piece.group], self._flag(piece), self.blocks_of(piece)
        flags[flag : flag + blocks] = b"\1" * blocks
        self.missing_pieces -= blocks
        if blocks > 1:
            return blocks
        first, count = self._first_flag(piece), self._cut.pieces_per_block(piece.group)
        return int(all(flags[first : first + count]))

    def _flag(self, piece: Piece) -> int:
        return self._first_flag(piece) + piece.offset // self._cut.piece_bytes

    def _first_flag(self, piece: Piece) -> int:
        """Of the piece's block."""
        expected = piece.ordinal - self.resident_counts[piece.group]
        return expected * self._cut.pieces_per_block(piece.group)

    @property
    def closed(self) -> bool:
        """Nothing more is taken: the commit is here."""
        return self.committed or self.postponed is not None

    @property
    def _cut(self) -> Geometry:
        assert self._geometry is not None, "how a transfer is cut is known when its first piece is here"
        return self._geometry


class Paid(NamedTuple):
    """A record that came ahead, and the ticket of ours in it."""

    record: CommitRecord
    body: TicketBody

    @property
    def described(self) -> bool:
        """Whether the record is all but what the last step finds; else it has the ticket alone."""
        return self.record.prompt_length > 0


def check_record(frame: Record, signer: TicketSigner, incarnation: bytes) -> Paid:
    """A record that pays with our own ticket for this transfer; else BatonError."""
    record = _parsed(frame.record)
    body = signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
    if body.transfer_id != frame.transfer or body.issuer.incarnation != incarnation:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another transfer")
    if record.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
    return Paid(record, body)


def check_commit(commit: Commit, incoming: Incoming) -> CommitRecord:
    """The whole record, if its ticket came ahead and nothing is missing; else BatonError. Where the rest came
    ahead too, only what the last step found is taken."""
    if incoming.paid is None:
        raise BatonError(ErrorKind.FORBIDDEN, "no ticket came before the commit")
    found, body = _parsed(commit.record), incoming.paid.body
    if incoming.paid.described:
        record = incoming.paid.record
        complete(record, found)
        record.block_counts[:] = found.block_counts
    elif found.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
    else:
        record = found
    incoming.compare(record.block_counts, body)
    if incoming.missing_pieces:
        # Such as one whose transfer was misread on the way: another attempt may be luckier.
        raise BatonError(ErrorKind.UNAVAILABLE, f"{incoming.missing_pieces} pieces never arrived")
    return record


def complete(record: CommitRecord, found: CommitRecord) -> None:
    """A record that was said at the beginning has what the last step found, and nothing else of it."""
    record.first_token_id, record.first_number = found.first_token_id, found.first_number
    if found.HasField("first_logprobs"):
        record.first_logprobs.CopyFrom(found.first_logprobs)


def _parsed(record: bytes) -> CommitRecord:
    try:
        return CommitRecord.FromString(record)
    except DecodeError as error:
        raise BatonError(ErrorKind.INTERNAL, "the commit record cannot be read") from error
