"""One expected transfer at the receiver: which of its bytes have arrived.

expected ──metadata with its ticket──▶ bound to a link ──commit──▶ committed ──acknowledge, refuse──▶ gone
    └────────────── forget, withdraw, link broken, bad checksum ───────────────────────▶ gone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import Commit, Metadata, Piece
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.protocol.ticket import TicketSigner, resident_counts

if TYPE_CHECKING:
    from kvtransfer.receiver.link import ReceivingLink


class InboundTransfer:
    """Tracks every piece of every expected block: of each cache group, blocks `resident_counts` to
    `block_counts`."""

    def __init__(
        self, transfer_id: int, block_counts: Sequence[int], resident: Sequence[int], groups: int
    ) -> None:
        """ValueError where there is not one count for each cache group."""
        if not len(block_counts) == len(resident) == groups:
            raise ValueError(
                f"{len(block_counts)} and {len(resident)} block counts for {groups} cache groups"
            )
        self.transfer_id = transfer_id
        self.block_counts = tuple(block_counts)
        self.resident_counts = tuple(resident)
        self.sent_counts = tuple(map(int.__sub__, block_counts, resident))
        self.link: ReceivingLink | None = None
        self.verified: VerifiedTicket | None = None  # nothing is accepted without it
        self.started = False
        self.committed = False
        # Pieces that a device is moving, and the record of the commit that waits for them.
        self.moving = 0
        self.pending_commit: CommitRecord | None = None
        self._geometry: PieceGeometry | None = None
        self._arrived: list[bytearray] = []
        self.missing_pieces = 0

    def bind(self, link: ReceivingLink) -> None:
        """Its pieces come over this link from now on, cut as that link cuts them."""
        geometry = link.cut.geometry
        if self._geometry is not geometry:
            assert self.link is None, "pieces of a transfer come over one link"
            self._geometry = geometry
            # One flag for each piece, block after block.
            self._arrived = [
                bytearray(count * geometry.pieces_per_block(group))
                for group, count in enumerate(self.sent_counts)
            ]
            self.missing_pieces = sum(map(len, self._arrived))
        if self.link is None:
            self.link = link
            link.transfers.add(self.transfer_id)

    def check_counts(self, sent: Sequence[int], body: TicketBody) -> None:
        """BatonError(INTERNAL) unless the sender's counts and those of its ticket are as expected."""
        counts = (tuple(sent), tuple(body.block_counts), resident_counts(body))
        if counts != (self.sent_counts, self.block_counts, self.resident_counts):
            raise BatonError(
                ErrorKind.INTERNAL,
                f"block counts differ: {list(sent)} sent, {list(body.block_counts)} in the ticket, "
                f"{list(self.block_counts)} expected, {list(self.resident_counts)} of them resident",
            )

    def expects(self, piece: Piece) -> bool:
        """Whether this is a piece of expected blocks."""
        return (
            self._bound_geometry.is_piece(piece.group, piece.offset, piece.length)
            and self.resident_counts[piece.group] <= piece.ordinal
            and piece.ordinal + self.blocks_of(piece) <= self.block_counts[piece.group]
        )

    def blocks_of(self, piece: Piece) -> int:
        """How many blocks it belongs to."""
        return self._bound_geometry.blocks_of(piece.group, piece.length)

    def has_any(self, piece: Piece) -> bool:
        """Whether any part of an expected piece was marked before."""
        first = self._flag(piece)
        return any(self._arrived[piece.group][first : first + self.blocks_of(piece)])

    def mark(self, piece: Piece) -> int:
        """Marks an expected piece as arrived, once it is scattered or about to be; how many blocks it
        completes."""
        flags, flag, blocks = self._arrived[piece.group], self._flag(piece), self.blocks_of(piece)
        flags[flag : flag + blocks] = b"\1" * blocks
        self.missing_pieces -= blocks
        if blocks > 1:
            return blocks
        first, count = self._first_flag(piece), self._bound_geometry.pieces_per_block(piece.group)
        return int(all(flags[first : first + count]))

    def _flag(self, piece: Piece) -> int:
        return self._first_flag(piece) + piece.offset // self._bound_geometry.piece_bytes

    def _first_flag(self, piece: Piece) -> int:
        """The first flag of the piece's block."""
        expected = piece.ordinal - self.resident_counts[piece.group]
        return expected * self._bound_geometry.pieces_per_block(piece.group)

    @property
    def complete(self) -> bool:
        """Whether its commit has come: nothing more is accepted."""
        return self.committed or self.pending_commit is not None

    @property
    def _bound_geometry(self) -> PieceGeometry:
        assert self._geometry is not None, "pieces are accepted only once the transfer is bound to a link"
        return self._geometry


class VerifiedTicket(NamedTuple):
    """The metadata of a transfer, and the verified ticket in it."""

    record: CommitRecord
    body: TicketBody

    @property
    def has_metadata(self) -> bool:
        """Whether the record has early metadata; otherwise it has the ticket alone."""
        return self.record.prompt_length > 0


def verify_metadata(frame: Metadata, signer: TicketSigner, incarnation: bytes) -> VerifiedTicket:
    """Metadata with a ticket of this receiver for this transfer; BatonError otherwise."""
    record = _parse(frame.record)
    body = signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
    if body.transfer_id != frame.transfer or body.issuer.incarnation != incarnation:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another transfer")
    if record.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another attempt")
    return VerifiedTicket(record, body)


def check_commit(commit: Commit, transfer: InboundTransfer) -> CommitRecord:
    """The complete record of a commit whose ticket was verified and whose pieces are all there; BatonError
    otherwise. Where there was early metadata, the commit only adds the results of prefill's last step."""
    if transfer.verified is None:
        raise BatonError(ErrorKind.FORBIDDEN, "no ticket came before the commit")
    found, body = _parse(commit.record), transfer.verified.body
    if transfer.verified.has_metadata:
        record = transfer.verified.record
        add_first_token(record, found)
        record.block_counts[:] = found.block_counts
    elif found.attempt != body.attempt:
        raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another attempt")
    else:
        record = found
    transfer.check_counts(record.block_counts, body)
    if transfer.missing_pieces:
        # UNAVAILABLE: frames may have been corrupted on the way, so another attempt may succeed.
        raise BatonError(ErrorKind.UNAVAILABLE, f"{transfer.missing_pieces} pieces never arrived")
    return record


def add_first_token(record: CommitRecord, found: CommitRecord) -> None:
    """Copies into early metadata what prefill's last step produced, and nothing else of `found`."""
    record.first_token_id, record.first_number = found.first_token_id, found.first_number
    if found.HasField("first_logprobs"):
        record.first_logprobs.CopyFrom(found.first_logprobs)


def _parse(record: bytes) -> CommitRecord:
    try:
        return CommitRecord.FromString(record)
    except DecodeError as error:
        raise BatonError(ErrorKind.INTERNAL, "the commit record cannot be parsed") from error
