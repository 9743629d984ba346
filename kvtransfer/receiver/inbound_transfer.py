"""One expected transfer at the receiver: which metadata, pieces and commit it accepts, and what they change.

expected ──metadata with its ticket──▶ bound to a link ──commit──▶ committed ──acknowledge, refuse──▶ gone
    └────────────── forget, withdraw, link broken, bad checksum ───────────────────────▶ gone
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.device.scatter import DeviceScatter, Outcome
from kvtransfer.protocol.commit_record import add_first_token
from kvtransfer.protocol.frames import Commit, FrameError, Metadata, Piece, WithdrawReason
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import (
    CommitPending,
    Committed,
    MetadataReceived,
    ReceiverCounters,
    ReceiverEvent,
    TransferStarted,
    Withdrawn,
)
from kvtransfer.receiver.expected_pieces import ExpectedPieces

if TYPE_CHECKING:
    from kvtransfer.receiver.link import ReceivingLink


class BlockSink(Protocol):
    """The sink of verified bytes: the engine, which knows the blocks of a transfer."""

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        """Copies `data` to `offset` of the transfer's `ordinal`-th block of `group`; `data` is not valid
        after the call."""


@dataclass(frozen=True, slots=True)
class TransferContext:
    """State that all transfers of a receiver share. `incarnation`: the receiver's own; `events`: those that
    the loop has not taken yet."""

    signer: TicketSigner
    incarnation: bytes
    sink: BlockSink
    counters: ReceiverCounters
    events: list[ReceiverEvent] = field(default_factory=list)


class PieceRejectedError(BatonError):
    """A piece breaks a rule of its transfer, which ends for this reason."""

    def __init__(self, reason: WithdrawReason, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.reason = reason


class VerifiedTicket(NamedTuple):
    """The metadata of a transfer, and the verified ticket in it."""

    record: CommitRecord
    body: TicketBody

    @property
    def has_metadata(self) -> bool:
        """True if the record has early metadata; otherwise it has the ticket alone."""
        return self.record.prompt_length > 0


class InboundTransfer:
    """The rules of one transfer; `InboundTransfers` gives it only frames of the link to which it is bound."""

    def __init__(self, transfer_id: int, pieces: ExpectedPieces, context: TransferContext) -> None:
        self.transfer_id = transfer_id
        self.pieces = pieces
        self.link: ReceivingLink | None = None
        self.verified: VerifiedTicket | None = None  # nothing is accepted without it
        self.committed = False
        # The record of a commit that waits for pieces that a device is moving.
        self.pending_commit: CommitRecord | None = None
        self._moving = 0
        self._started = False
        self._context = context

    @property
    def complete(self) -> bool:
        """True once the transfer's commit has come: nothing more is accepted."""
        return self.committed or self.pending_commit is not None

    def moves(self, link: ReceivingLink) -> bool:
        """Returns whether pieces of this link's device are still its own."""
        return self.link is link and not self.committed

    # -- metadata ---------------------------------------------------------------------------------

    def bind(self, link: ReceivingLink, metadata: Metadata) -> None:
        """Binds the transfer to the link whose sender has its ticket: from now on it accepts pieces, a commit
        or a withdrawal over this link. Until the first piece its ticket can still expire. Raises
        BatonError where the ticket is not of this receiver for this transfer."""
        if self.verified is not None or self._started:
            self._context.counters.dropped_unknown += 1
            return
        self.verified = self._verify_ticket(metadata)
        self.pieces.cut(link.cut.geometry)
        self.link = link
        link.transfers.add(self.transfer_id)
        if self.verified.has_metadata:
            self._context.events.append(MetadataReceived(self.transfer_id, self.verified.record))

    def _verify_ticket(self, metadata: Metadata) -> VerifiedTicket:
        record = _parse(metadata.record)
        ticket = Ticket(body=record.ticket_body, signature=record.ticket_signature)
        body = self._context.signer.verify(ticket)
        if body.transfer_id != metadata.transfer or body.issuer.incarnation != self._context.incarnation:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another transfer")
        if record.attempt != body.attempt:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another attempt")
        return VerifiedTicket(record, body)

    # -- pieces -----------------------------------------------------------------------------------

    def accept(self, piece: Piece) -> None:
        """Verifies a piece in staging on the host and scatters it. Raises PieceRejectedError for a corrupt
        or unexpected piece, FrameError where the sender cuts blocks differently."""
        self._start()
        self._verify_and_scatter(piece)

    def announce(self, piece: Piece, scatter: DeviceScatter) -> None:
        """Makes the device move an announced piece if its place is expected and free. An unexpected piece
        stays in staging, to be verified on the host once its bytes are there."""
        self._start()
        if not self.pieces.expects(piece):
            self._moving += 1
            scatter.keep_in_staging(piece)
        elif self.pieces.has_any(piece):
            self._context.counters.dropped_unknown += 1
            scatter.drop(piece)
        else:
            self._moving += 1
            whole_blocks = self.pieces.mark(piece)
            arrival = self._bound_link.device_wire.arrival_event(piece)
            scatter.begin(piece, self.pieces.blocks_of(piece), whole_blocks, arrival)

    def moved(self, piece: Piece, outcome: Outcome) -> None:
        """Takes an announced piece back from the device; completes a commit that waited for the last one.
        Raises as `accept`."""
        self._moving -= 1
        if outcome is Outcome.CORRUPT:
            raise self._corrupted()
        if outcome is Outcome.IN_STAGING:
            reported = self._bound_link.device_wire.checksum(piece)
            self._verify_and_scatter(replace(piece, checksum=reported))
        if self.pending_commit is not None and not self._moving:
            self._complete(self.pending_commit)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._context.events.append(TransferStarted(self.transfer_id))

    def _verify_and_scatter(self, piece: Piece) -> None:
        link, counters = self._bound_link, self._context.counters
        data = link.staging.view(piece.staging, piece.length)
        found = link.cut.checksum.of(data, piece.transfer, piece.group, piece.ordinal, piece.offset)
        if found != piece.checksum:
            raise self._corrupted()
        if not link.cut.geometry.is_piece(piece.group, piece.offset, piece.length):
            # The sender cuts blocks differently: no transfer could succeed over this link.
            raise FrameError(f"blocks are not cut into such pieces: {piece}")
        if not self.pieces.expects(piece):
            message = f"transfer {piece.transfer} has no such piece: {piece}"
            raise PieceRejectedError(WithdrawReason.REFUSED, ErrorKind.INTERNAL, message)
        if self.pieces.has_any(piece):
            counters.dropped_unknown += 1
            return
        self._context.sink.scatter(piece.transfer, piece.group, piece.ordinal, piece.offset, data)
        counters.bytes_received += piece.length
        counters.blocks_received[piece.group] += self.pieces.mark(piece)

    def _corrupted(self) -> PieceRejectedError:
        self._context.counters.checksum_failures += 1
        message = f"checksum mismatch in a piece of transfer {self.transfer_id}"
        return PieceRejectedError(WithdrawReason.CORRUPTED, ErrorKind.UNAVAILABLE, message)

    # -- the end ----------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> None:
        """Completes the transfer, at once or when the device has moved its last pieces. Raises
        BatonError where no ticket came before, the record is not as expected, or pieces are
        missing."""
        record = self._complete_record(commit)
        if self._moving:
            self.pending_commit = record
            self._context.events.append(CommitPending(self.transfer_id, record))
        else:
            self._complete(record)

    def _complete_record(self, commit: Commit) -> CommitRecord:
        """Returns the whole record. If there was early metadata, the commit only adds the results of
        prefill's last step."""
        if self.verified is None:
            raise BatonError(ErrorKind.FORBIDDEN, "no ticket came before the commit")
        found, body = _parse(commit.record), self.verified.body
        if self.verified.has_metadata:
            record = self.verified.record
            add_first_token(record, found)
            record.block_counts[:] = found.block_counts
        elif found.attempt != body.attempt:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was issued for another attempt")
        else:
            record = found
        self.pieces.check_counts(record.block_counts, body)
        if self.pieces.missing:
            # UNAVAILABLE: frames may have been corrupted on the way, so another attempt may succeed.
            raise BatonError(ErrorKind.UNAVAILABLE, f"{self.pieces.missing} pieces never arrived")
        return record

    def _complete(self, record: CommitRecord) -> None:
        self.committed = True
        self._bound_link.transfers.discard(self.transfer_id)
        self._context.events.append(Committed(self.transfer_id, record))

    def withdraw(self, reason: WithdrawReason, message: str) -> None:
        """Ends the transfer without a commit: no device writes its blocks after this."""
        self.cancel_moves()
        self._bound_link.transfers.discard(self.transfer_id)
        self._context.events.append(Withdrawn(self.transfer_id, reason, message))

    def cancel_moves(self) -> None:
        """Cancels the device's moves: afterwards no device writes the transfer's blocks, so they can be
        reused."""
        if self._moving and self.link is not None and self.link.scatter is not None:
            self.link.scatter.cancel(self.transfer_id)

    @property
    def _bound_link(self) -> ReceivingLink:
        assert self.link is not None, "the transfer is bound to a link before its pieces and commit"
        return self.link


def _parse(record: bytes) -> CommitRecord:
    try:
        return CommitRecord.FromString(record)
    except DecodeError as error:
        raise BatonError(ErrorKind.INTERNAL, "the commit record cannot be parsed") from error
