"""The expected transfers of a receiver: what their senders' frames do to them, and how they end.

Metadata, Piece, Commit, Withdraw ─▶ handle ─┬▶ the sink, counters
a device has moved pieces ─▶ collect_moved ──┤
the link breaks ─▶ link_broke ───────────────┴▶ events, answers to the sender
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.device.scatter import DeviceScatter, Outcome
from kvtransfer.protocol.frames import (
    Commit,
    CommitAck,
    FrameError,
    Metadata,
    Piece,
    Refused,
    SenderFrame,
    StopAck,
    StopReason,
    Withdraw,
    WithdrawReason,
)
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
from kvtransfer.receiver.inbound_transfer import InboundTransfer, check_commit, verify_metadata
from kvtransfer.receiver.link import ReceivingLink

# Answers to commits that are kept for commits that come again.
_MAX_ANSWERS = 4096


class BlockSink(Protocol):
    """Where verified bytes go: the engine, which knows the blocks of a transfer."""

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        """Copies `data` to `offset` of the transfer's `ordinal`-th block of `group`; `data` is not valid
        after the call."""


class InboundTransfers:
    """All transfers that a receiver expects or receives. Not thread-safe: used by the engine's loop alone."""

    def __init__(
        self,
        signer: TicketSigner,
        incarnation: bytes,
        sink: BlockSink,
        counters: ReceiverCounters,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`timeout_s`: how long a sender may take to acknowledge a stop."""
        self._signer = signer
        self._incarnation = incarnation
        self._sink = sink
        self.counters = counters
        self._groups = len(counters.blocks_received)
        self._timeout = timeout_s
        self._clock = clock
        self._transfers: dict[int, InboundTransfer] = {}
        self._answers: OrderedDict[int, CommitAck | Refused] = OrderedDict()
        self._events: list[ReceiverEvent] = []

    def __len__(self) -> int:
        """How many transfers are expected."""
        return len(self._transfers)

    @property
    def has_commits(self) -> bool:
        """Whether a `Committed` event has not been taken yet."""
        return any(isinstance(event, Committed) for event in self._events)

    def all_commits_received(self, link: ReceivingLink) -> bool:
        """True when the link has transfers, and every one of them has its commit and waits for a device to
        move its last pieces."""
        ids = link.transfers
        return bool(ids) and all(self._transfers[one].pending_commit is not None for one in ids)

    def take_events(self) -> list[ReceiverEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def expect(self, transfer_id: int, block_counts: Sequence[int], resident: Sequence[int] = ()) -> None:
        """Accepts this transfer's bytes from now on: `block_counts` blocks of each cache group, except for
        the first `resident` of them, which are never written. BatonError(CONFLICT) for a transfer that was
        expected before."""
        if transfer_id in self._transfers or transfer_id in self._answers:
            raise BatonError(ErrorKind.CONFLICT, f"transfer {transfer_id} was expected before")
        resident = resident or [0] * len(block_counts)
        self._transfers[transfer_id] = InboundTransfer(transfer_id, block_counts, resident, self._groups)

    def forget(self, transfer_id: int) -> None:
        """After this not one more byte of the transfer reaches the sink, and no event reports it. Idempotent.
        Blocks while a device moves a piece of it."""
        transfer = self._transfers.pop(transfer_id, None)
        self._events = [event for event in self._events if event.transfer_id != transfer_id]
        if transfer is None:
            return
        if transfer.link is not None:
            _cancel_moves(transfer)
            self._stop(transfer.link, transfer_id, StopReason.UNKNOWN)

    def acknowledge(self, transfer_id: int) -> None:
        """Accepts a commit and ends the transfer."""
        self._answer(transfer_id, CommitAck(transfer_id, time.monotonic_ns()))
        self.counters.transfers_committed += 1

    def refuse(self, transfer_id: int, error: BatonError) -> None:
        """Turns a commit down, with this reason, and ends the transfer."""
        self._answer(transfer_id, Refused(transfer_id, error.kind, error.message))

    def _answer(self, transfer_id: int, answer: CommitAck | Refused) -> None:
        """BatonError(NOT_FOUND) where no commit waits for an answer."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or not transfer.committed:
            raise BatonError(ErrorKind.NOT_FOUND, f"transfer {transfer_id} waits for no answer")
        del self._transfers[transfer_id]
        self._keep_answer(answer)
        if transfer.link is not None:
            transfer.link.wire.send(answer)
            transfer.link.flush()  # credits waited for this answer; the sender may begin another transfer

    def _keep_answer(self, answer: CommitAck | Refused) -> None:
        self._answers[answer.transfer] = answer
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def link_broke(self, link: ReceivingLink, error: BatonError) -> None:
        """Withdraws the link's transfers, except for those that are committed."""
        if link.scatter is not None:  # pieces that arrived before the break still count
            link.start_moves()
            for piece in link.scatter.break_off():
                link.staging.free(piece.staging)  # its sender may still write it
            with contextlib.suppress(FrameError):  # the link breaks anyway
                self.collect_moved(link)
        for transfer_id in sorted(link.transfers):
            del self._transfers[transfer_id]
            self._events.append(Withdrawn(transfer_id, WithdrawReason.LINK_LOST, error.message))
        link.transfers.clear()
        for transfer in self._transfers.values():
            if transfer.link is link:  # committed: it stays, but its answer can no longer be sent
                transfer.link = None

    # -- frames -----------------------------------------------------------------------------------

    def handle(self, link: ReceivingLink, frame: SenderFrame) -> None:
        """Handles one frame of a link. FrameError: the link is to be broken."""
        match frame:
            case Piece() if link.scatter is not None:
                self._device_piece(link, link.scatter, frame)
            case Piece():
                try:
                    if (transfer := self._accepting(link, frame)) is not None:
                        self._verify(link, transfer, frame)
                finally:
                    link.free(frame.staging)
                    link.flush_batch()
            case Metadata():
                self._metadata(link, frame)
            case Commit():
                self._commit(link, frame)
            case Withdraw():
                self._withdraw(link, frame)
            case StopAck():
                self.counters.dropped_unknown += not link.stop_acknowledged(frame)

    def collect_moved(self, link: ReceivingLink) -> None:
        """Handles pieces that the device is done with: frees their staging, and completes commits that waited
        for them. FrameError, once all are handled: the link is to be broken."""
        malformed: FrameError | None = None
        for moved in link.moved():
            piece = moved.piece
            if moved.outcome is Outcome.VALID:
                self.counters.bytes_received += piece.length
                self.counters.blocks_received[piece.group] += moved.whole_blocks
            try:
                self._moved(link, piece, moved.outcome)
            except FrameError as error:
                malformed = error
            link.free(piece.staging)
        if malformed is not None:
            raise malformed

    def _moved(self, link: ReceivingLink, piece: Piece, outcome: Outcome) -> None:
        transfer = self._transfers.get(piece.transfer)
        if outcome is Outcome.DROPPED or transfer is None or transfer.link is not link or transfer.committed:
            return  # of no transfer, or of one that has ended meanwhile
        transfer.moving -= 1
        if outcome is Outcome.CORRUPT:
            self._corrupted(transfer)
        elif outcome is Outcome.IN_STAGING:
            self._verify(link, transfer, replace(piece, checksum=link.device_wire.checksum(piece)))
        live = self._transfers.get(piece.transfer) is transfer
        if live and transfer.pending_commit is not None and not transfer.moving:
            self._accept(link, transfer, transfer.pending_commit)

    def _device_piece(self, link: ReceivingLink, scatter: DeviceScatter, piece: Piece) -> None:
        """Makes the device move an announced piece if its place is expected and free. An unexpected piece
        stays in staging, to be verified on the host once its bytes are there."""
        transfer = self._accepting(link, piece)
        if transfer is None:
            scatter.drop(piece)
        elif not transfer.expects(piece):
            transfer.moving += 1
            scatter.keep_in_staging(piece)
        elif transfer.has_any(piece):
            self.counters.dropped_unknown += 1
            scatter.drop(piece)
        else:
            transfer.moving += 1
            whole_blocks, arrival = transfer.mark(piece), link.device_wire.arrival_event(piece)
            scatter.begin(piece, transfer.blocks_of(piece), whole_blocks, arrival)

    def _accepting(self, link: ReceivingLink, piece: Piece) -> InboundTransfer | None:
        """The transfer that accepts a piece over this link, or None."""
        transfer = self._transfers.get(piece.transfer)
        if transfer is None or transfer.link is not link or transfer.complete:
            self.counters.dropped_unknown += 1
            if transfer is None and piece.transfer not in self._answers:
                self._stop(link, piece.transfer, StopReason.UNKNOWN)
            elif transfer is not None and transfer.verified is None:
                self._stop(link, piece.transfer, StopReason.REFUSED)
            return None
        if not transfer.started:
            transfer.started = True
            self._events.append(TransferStarted(transfer.transfer_id))
        return transfer

    def _verify(self, link: ReceivingLink, transfer: InboundTransfer, piece: Piece) -> None:
        """Verifies a piece on the host and scatters it; over a link between devices, only unexpected ones."""
        data = link.staging.view(piece.staging, piece.length)
        found = link.cut.checksum.of(data, piece.transfer, piece.group, piece.ordinal, piece.offset)
        if found != piece.checksum:
            self._corrupted(transfer)
        elif not link.cut.geometry.is_piece(piece.group, piece.offset, piece.length):
            # The sender cuts blocks differently: no transfer could succeed over this link.
            raise FrameError(f"blocks are not cut into such pieces: {piece}")
        elif not transfer.expects(piece):
            error = BatonError(ErrorKind.INTERNAL, f"transfer {piece.transfer} has no such piece: {piece}")
            self._fail(transfer, WithdrawReason.REFUSED, error)
        elif transfer.has_any(piece):
            self.counters.dropped_unknown += 1
        else:
            self._sink.scatter(piece.transfer, piece.group, piece.ordinal, piece.offset, data)
            self.counters.bytes_received += piece.length
            self.counters.blocks_received[piece.group] += transfer.mark(piece)

    def _corrupted(self, transfer: InboundTransfer) -> None:
        self.counters.checksum_failures += 1
        error = BatonError(
            ErrorKind.UNAVAILABLE, f"checksum mismatch in a piece of transfer {transfer.transfer_id}"
        )
        self._fail(transfer, WithdrawReason.CORRUPTED, error)

    def _metadata(self, link: ReceivingLink, frame: Metadata) -> None:
        """Binds a transfer to the link whose sender has its ticket: from now on it accepts pieces, a commit
        or a withdrawal over this link. Until the first piece its ticket can still expire."""
        transfer = self._accepting_record(link, frame.transfer)
        if transfer is None:
            return
        if transfer.verified is not None or transfer.started:
            self.counters.dropped_unknown += 1
            return
        try:
            transfer.verified = verify_metadata(frame, self._signer, self._incarnation)
        except BatonError as error:
            self._record_refused(link, transfer, error)
            return
        transfer.bind(link)
        if transfer.verified.has_metadata:
            self._events.append(MetadataReceived(frame.transfer, transfer.verified.record))

    def _commit(self, link: ReceivingLink, commit: Commit) -> None:
        transfer = self._accepting_record(link, commit.transfer)
        if transfer is None:
            return
        try:
            record = check_commit(commit, transfer)
        except BatonError as error:
            self._record_refused(link, transfer, error)
            return
        if transfer.moving:
            transfer.pending_commit = record
            self._events.append(CommitPending(commit.transfer, record))
        else:
            self._accept(link, transfer, record)

    def _accepting_record(self, link: ReceivingLink, transfer_id: int) -> InboundTransfer | None:
        """The transfer that accepts metadata or a commit over this link; None, with an answer to the sender,
        where there is none."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and not transfer.complete and transfer.link in (None, link):
            return transfer
        self.counters.dropped_unknown += 1
        # UNAVAILABLE: its ticket has ended, and another attempt gets another one.
        unknown = Refused(transfer_id, ErrorKind.UNAVAILABLE, "the receiver does not expect this transfer")
        if transfer is None:
            link.wire.send(self._answers.get(transfer_id, unknown))
        elif transfer.link is not link:
            link.wire.send(unknown)
        return None

    def _record_refused(self, link: ReceivingLink, transfer: InboundTransfer, error: BatonError) -> None:
        if transfer.link is None:  # its sender has shown no valid ticket: the transfer stays expected
            link.wire.send(Refused(transfer.transfer_id, error.kind, error.message))
        else:
            self._fail(transfer, WithdrawReason.REFUSED, error)

    def _accept(self, link: ReceivingLink, transfer: InboundTransfer, record: CommitRecord) -> None:
        transfer.committed = True
        link.transfers.discard(transfer.transfer_id)
        self._events.append(Committed(transfer.transfer_id, record))

    def _withdraw(self, link: ReceivingLink, frame: Withdraw) -> None:
        transfer = self._transfers.get(frame.transfer)
        if transfer is None or transfer.committed or transfer.link is not link:
            self.counters.dropped_unknown += 1
            return
        _cancel_moves(transfer)
        self._remove(transfer)
        self._events.append(Withdrawn(frame.transfer, frame.reason, "the sender withdrew"))

    # -- endings ----------------------------------------------------------------------------------

    def _fail(self, transfer: InboundTransfer, reason: WithdrawReason, error: BatonError) -> None:
        """Ends a bound transfer on the receiver's side; the link goes on."""
        link = transfer.link
        assert link is not None
        _cancel_moves(transfer)
        self._remove(transfer)
        self._events.append(Withdrawn(transfer.transfer_id, reason, error.message))
        refused = Refused(transfer.transfer_id, error.kind, error.message)
        link.wire.send(refused)
        self._stop(link, transfer.transfer_id, StopReason.REFUSED)
        self._keep_answer(refused)

    def _remove(self, transfer: InboundTransfer) -> None:
        del self._transfers[transfer.transfer_id]
        if transfer.link is not None:
            transfer.link.transfers.discard(transfer.transfer_id)

    def _stop(self, link: ReceivingLink, transfer_id: int, reason: StopReason) -> None:
        link.transfers.discard(transfer_id)
        link.stop(transfer_id, reason, self._clock() + self._timeout)


def _cancel_moves(transfer: InboundTransfer) -> None:
    """After this no device writes the transfer's blocks, so they can be reused."""
    if transfer.moving and transfer.link is not None and transfer.link.scatter is not None:
        transfer.link.scatter.cancel(transfer.transfer_id)
