"""The expected transfers of a receiver: finds the one that a frame is about, and answers its sender.

Metadata, Piece, Commit, Withdraw ─▶ handle ─┬▶ InboundTransfer: the sink, counters, events
a device has moved pieces ─▶ collect_moved ──┤
the link breaks ─▶ link_broke ───────────────┴▶ answers to the sender
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.device.scatter import Outcome
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
from kvtransfer.receiver.events import Committed, ReceiverEvent, Withdrawn
from kvtransfer.receiver.expected_pieces import ExpectedPieces
from kvtransfer.receiver.inbound_transfer import InboundTransfer, PieceRejectedError, TransferContext
from kvtransfer.receiver.link import ReceivingLink

# Answers to commits that are kept for commits that come again.
_MAX_ANSWERS = 4096


class InboundTransfers:
    """All transfers that a receiver expects or receives. Not thread-safe: used by the engine's loop alone."""

    def __init__(self, context: TransferContext, timeout_s: float, clock: Callable[[], float]) -> None:
        """`timeout_s`: how long a sender may take to acknowledge a stop."""
        self.counters = context.counters
        self._groups = len(self.counters.blocks_received)
        self._timeout = timeout_s
        self._clock = clock
        self._transfers: dict[int, InboundTransfer] = {}
        self._answers: OrderedDict[int, CommitAck | Refused] = OrderedDict()
        self._events = context.events
        self._context = context

    def __len__(self) -> int:
        """Number of transfers that are expected."""
        return len(self._transfers)

    @property
    def has_commits(self) -> bool:
        """True if a `Committed` event has not been taken yet."""
        return any(isinstance(event, Committed) for event in self._events)

    def all_commits_received(self, link: ReceivingLink) -> bool:
        """True when the link has transfers, and every one of them has its commit and waits for a device to
        move its last pieces."""
        ids = link.transfers
        return bool(ids) and all(self._transfers[one].pending_commit is not None for one in ids)

    def take_events(self) -> list[ReceiverEvent]:
        """Returns the events since the last call."""
        events = self._events.copy()
        self._events.clear()
        return events

    def expect(self, transfer_id: int, block_counts: Sequence[int], resident: Sequence[int] = ()) -> None:
        """Accepts this transfer's bytes from now on: `block_counts` blocks of each cache group, except for
        the first `resident` of them, which are never written. BatonError(CONFLICT) for a transfer that was
        expected before."""
        if transfer_id in self._transfers or transfer_id in self._answers:
            raise BatonError(ErrorKind.CONFLICT, f"transfer {transfer_id} was expected before")
        pieces = ExpectedPieces(block_counts, resident or [0] * len(block_counts), self._groups)
        self._transfers[transfer_id] = InboundTransfer(transfer_id, pieces, self._context)

    def forget(self, transfer_id: int) -> None:
        """Forgets a transfer: afterwards not one more byte of it reaches the sink, and no event reports it.
        Idempotent. Blocks while a device moves a piece of it."""
        transfer = self._transfers.pop(transfer_id, None)
        self._events[:] = [event for event in self._events if event.transfer_id != transfer_id]
        if transfer is None:
            return
        if transfer.link is not None:
            transfer.cancel_moves()
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
                if (transfer := self._accepting(link, frame)) is not None:
                    transfer.announce(frame, link.scatter)
                else:
                    link.scatter.drop(frame)
            case Piece():
                self._piece(link, frame)
            case Metadata() | Commit():
                self._record(link, frame)
            case Withdraw():
                self._withdraw(link, frame)
            case StopAck():
                self.counters.dropped_unknown += not link.stop_acknowledged(frame)

    def collect_moved(self, link: ReceivingLink) -> None:
        """Handles pieces that the device is done with: frees their staging, and completes commits that waited
        for them. FrameError, once all are handled: the link is to be broken."""
        malformed: FrameError | None = None
        for piece, whole_blocks, outcome in link.moved():
            if outcome is Outcome.VALID:
                self.counters.bytes_received += piece.length
                self.counters.blocks_received[piece.group] += whole_blocks
            transfer = self._transfers.get(piece.transfer)
            if outcome is not Outcome.DROPPED and transfer is not None and transfer.moves(link):
                try:
                    transfer.moved(piece, outcome)
                except PieceRejectedError as error:
                    self._fail(link, transfer, error.reason, error)
                except FrameError as error:
                    malformed = error
            link.free(piece.staging)
        if malformed is not None:
            raise malformed

    def _piece(self, link: ReceivingLink, piece: Piece) -> None:
        try:
            if (transfer := self._accepting(link, piece)) is not None:
                transfer.accept(piece)
        except PieceRejectedError as error:
            self._fail(link, self._transfers[piece.transfer], error.reason, error)
        finally:
            link.free(piece.staging)
            link.flush_batch()

    def _accepting(self, link: ReceivingLink, piece: Piece) -> InboundTransfer | None:
        """Returns the transfer that accepts a piece over this link; None where there is none, which stops its
        sender."""
        transfer = self._transfers.get(piece.transfer)
        if transfer is not None and transfer.link is link and not transfer.complete:
            return transfer
        self.counters.dropped_unknown += 1
        if transfer is None and piece.transfer not in self._answers:
            self._stop(link, piece.transfer, StopReason.UNKNOWN)
        elif transfer is not None and transfer.verified is None:
            self._stop(link, piece.transfer, StopReason.REFUSED)
        return None

    def _record(self, link: ReceivingLink, frame: Metadata | Commit) -> None:
        transfer = self._accepting_record(link, frame.transfer)
        if transfer is None:
            return
        try:
            if isinstance(frame, Metadata):
                transfer.bind(link, frame)
            else:
                transfer.commit(frame)
        except BatonError as error:
            if transfer.link is None:  # its sender has shown no valid ticket: the transfer stays expected
                link.wire.send(Refused(transfer.transfer_id, error.kind, error.message))
            else:
                self._fail(link, transfer, WithdrawReason.REFUSED, error)

    def _accepting_record(self, link: ReceivingLink, transfer_id: int) -> InboundTransfer | None:
        """Returns the transfer that accepts metadata or a commit over this link; None, with an answer to the
        sender, where there is none."""
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

    def _withdraw(self, link: ReceivingLink, frame: Withdraw) -> None:
        transfer = self._transfers.get(frame.transfer)
        if transfer is None or transfer.committed or transfer.link is not link:
            self.counters.dropped_unknown += 1
            return
        transfer.withdraw(frame.reason, "the sender withdrew")
        del self._transfers[frame.transfer]

    def _fail(
        self, link: ReceivingLink, transfer: InboundTransfer, reason: WithdrawReason, error: BatonError
    ) -> None:
        """Ends a bound transfer on the receiver's side; the link goes on."""
        transfer.withdraw(reason, error.message)
        del self._transfers[transfer.transfer_id]
        refused = Refused(transfer.transfer_id, error.kind, error.message)
        link.wire.send(refused)
        self._stop(link, transfer.transfer_id, StopReason.REFUSED)
        self._keep_answer(refused)

    def _stop(self, link: ReceivingLink, transfer_id: int, reason: StopReason) -> None:
        link.transfers.discard(transfer_id)
        link.stop(transfer_id, reason, self._clock() + self._timeout)
