"""What becomes of expected transfers: what their senders' frames do to them, and how they end.

Record, Piece, Commit, Withdraw ─▶ handle ─┬▶ the sink, counters
a device has moved pieces ─▶ take_ended ───┤
the link has broken ─▶ lose ───────────────┴▶ events, answers to the sender
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.device.scatter import DeviceScatter, Outcome
from kvtransfer.protocol import frames
from kvtransfer.protocol.frames import (
    Commit,
    FrameError,
    Piece,
    Quiet,
    Record,
    Refused,
    SenderFrame,
    StopReason,
    Withdraw,
    WithdrawReason,
)
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.answers import Answers
from kvtransfer.receiver.counters import ReceiverCounters
from kvtransfer.receiver.events import Announced, Arrived, Committed, Described, ReceiverEvent, Withdrawn
from kvtransfer.receiver.inbound_transfer import Incoming, check_commit, check_record
from kvtransfer.receiver.link import ReceivingLink


class BlockSink(Protocol):
    """Where verified bytes go: the engine process, which knows the blocks behind a transfer."""

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        """Copies `data` to `offset` of the transfer's `ordinal`-th block of `group`; then `data` is void."""


class Arrivals:
    """Of one receiver, whose loop calls everything here."""

    def __init__(
        self,
        signer: TicketSigner,
        incarnation: bytes,
        sink: BlockSink,
        counters: ReceiverCounters,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`timeout_s`: how long a sender may take to answer a stop."""
        self._signer = signer
        self._incarnation = incarnation
        self._sink = sink
        self.counters = counters
        self._groups = len(counters.blocks_received)
        self._timeout = timeout_s
        self._clock = clock
        self._incoming: dict[int, Incoming] = {}
        self._answers = Answers()
        self._events: list[ReceiverEvent] = []

    def __len__(self) -> int:
        """How many transfers are expected."""
        return len(self._incoming)

    @property
    def commits(self) -> bool:
        """Whether an event waits that somebody is to be admitted by."""
        return any(isinstance(event, Committed) for event in self._events)

    def said(self, link: ReceivingLink) -> bool:
        """Whether there are transfers of this link whose bytes a device moves, and all that there is to say
        of them has been said, commits too."""
        transfers = link.transfers
        return bool(transfers) and all(self._incoming[one].postponed is not None for one in transfers)

    def take_events(self) -> list[ReceiverEvent]:
        """Since the last call."""
        events, self._events = self._events, []
        return events

    def expect(self, transfer_id: int, block_counts: Sequence[int], held: Sequence[int]) -> None:
        """As `Receiver.expect`. `BatonError` CONFLICT for a transfer that was expected before."""
        if transfer_id in self._incoming or transfer_id in self._answers:
            raise BatonError(ErrorKind.CONFLICT, f"transfer {transfer_id} was given out before")
        held = held or [0] * len(block_counts)
        self._incoming[transfer_id] = Incoming(transfer_id, block_counts, held, self._groups)

    def forget(self, transfer_id: int) -> None:
        """As `Receiver.forget`."""
        incoming = self._incoming.pop(transfer_id, None)
        self._events = [event for event in self._events if event.transfer_id != transfer_id]
        if incoming is None:
            return
        if incoming.link is not None:
            _finish(incoming)
            self._stop(incoming.link, transfer_id, StopReason.FORGOTTEN)

    def answer(self, transfer_id: int, answer: frames.Committed | Refused) -> None:
        """Of a commit that was told: the transfer is over."""
        incoming = self._incoming.get(transfer_id)
        if incoming is None or not incoming.committed:
            raise BatonError(ErrorKind.NOT_FOUND, f"transfer {transfer_id} waits for no answer")
        del self._incoming[transfer_id]
        self._answers.remember(answer)
        if incoming.link is not None:
            incoming.link.tell(answer)
            incoming.link.flush()  # of what waited for it: its sender may begin another

    def lose(self, link: ReceivingLink, error: BatonError) -> None:
        """The link breaks: its transfers are withdrawn, but for those that are committed."""
        if link.scatter is not None:  # what has landed before the break still counts
            link.land()
            for piece in link.scatter.break_off():
                link.staging.give_back(piece.staging)  # its sender may still write it
            with contextlib.suppress(FrameError):  # it breaks already
                self.take_ended(link)
        for transfer_id in sorted(link.transfers):
            del self._incoming[transfer_id]
            self._events.append(Withdrawn(transfer_id, WithdrawReason.LINK_LOST, error.message))
        link.transfers.clear()
        for incoming in self._incoming.values():
            if incoming.link is link:  # committed: it stays, there is only nobody left to tell
                incoming.link = None

    # -- frames -----------------------------------------------------------------------------------

    def handle(self, link: ReceivingLink, frame: SenderFrame) -> None:
        """One frame of a link. `FrameError`: the link is to be broken."""
        match frame:
            case Piece() if link.scatter is not None:
                self._announced(link, link.scatter, frame)
            case Piece():
                try:
                    self._piece(link, frame)
                finally:
                    link.release(frame.staging)
                    link.flush_batch()
            case Record():
                self._record(link, frame)
            case Commit():
                self._commit(link, frame)
            case Withdraw():
                self._withdraw(link, frame)
            case Quiet():
                self.counters.dropped_unknown += not link.quiet(frame)

    def take_ended(self, link: ReceivingLink) -> None:
        """What the device has done meanwhile: credits go home, commits that waited have their turn.
        `FrameError`, when all else is taken."""
        malformed: FrameError | None = None
        for ended in link.ended():
            piece = ended.piece
            if ended.outcome is Outcome.RIGHT:
                self.counters.bytes_received += piece.length
                self.counters.blocks_received[piece.group] += ended.whole_blocks
            try:
                self._ended(link, piece, ended.outcome)
            except FrameError as error:
                malformed = error
            link.release(piece.staging)
        if malformed is not None:
            raise malformed

    def _ended(self, link: ReceivingLink, piece: Piece, outcome: Outcome) -> None:
        incoming = self._incoming.get(piece.transfer)
        if outcome is Outcome.DROPPED or incoming is None or incoming.link is not link or incoming.committed:
            return  # nobody's, or given up meanwhile
        incoming.under_way -= 1
        if outcome is Outcome.WRONG:
            self._corrupted(incoming)
        elif outcome is Outcome.HELD:
            self._verify(link, incoming, replace(piece, checksum=link.checksum(piece)))
        live = self._incoming.get(piece.transfer) is incoming
        if live and incoming.postponed is not None and not incoming.under_way:
            self._accept(link, incoming, incoming.postponed)

    def _announced(self, link: ReceivingLink, scatter: DeviceScatter, piece: Piece) -> None:
        """A device will have it, if its place is expected and free; what is not as it should be is looked at
        when it has landed."""
        incoming = self._takes(link, piece)
        if incoming is None:
            scatter.drop(piece)
        elif not incoming.expects(piece):
            incoming.under_way += 1
            scatter.hold(piece)
        elif incoming.has(piece):
            self.counters.dropped_unknown += 1
            scatter.drop(piece)
        else:
            incoming.under_way += 1
            scatter.begin(piece, incoming.blocks_of(piece), incoming.mark(piece), link.arrival(piece))

    def _piece(self, link: ReceivingLink, piece: Piece) -> None:
        incoming = self._takes(link, piece)
        if incoming is not None:
            self._verify(link, incoming, piece)

    def _takes(self, link: ReceivingLink, piece: Piece) -> Incoming | None:
        """The transfer that takes it over this link, if any."""
        incoming = self._incoming.get(piece.transfer)
        if incoming is None or incoming.link is not link or incoming.closed:
            self.counters.dropped_unknown += 1
            if incoming is None and piece.transfer not in self._answers:
                self._stop(link, piece.transfer, StopReason.FORGOTTEN)
            elif incoming is not None and incoming.paid is None:
                self._stop(link, piece.transfer, StopReason.REFUSED)
            return None
        if not incoming.arrived:
            incoming.arrived = True
            self._events.append(Arrived(incoming.transfer_id))
        return incoming

    def _verify(self, link: ReceivingLink, incoming: Incoming, piece: Piece) -> None:
        """On the host; where a device moves blocks, only what is not as expected."""
        data = link.staging.view(piece.staging, piece.length)
        found = link.cut.checksum.of(data, piece.transfer, piece.group, piece.ordinal, piece.offset)
        if found != piece.checksum:
            self._corrupted(incoming)
        elif not link.cut.geometry.is_piece(piece.group, piece.offset, piece.length):
            # Its sender took another size of pieces for ours: over this link no transfer could succeed.
            raise FrameError(f"blocks are not cut so: {piece}")
        elif not incoming.expects(piece):
            error = BatonError(ErrorKind.INTERNAL, f"transfer {piece.transfer} has no such piece: {piece}")
            self._fail(incoming, WithdrawReason.REFUSED, error)
        elif incoming.has(piece):
            self.counters.dropped_unknown += 1
        else:
            self._sink.scatter(piece.transfer, piece.group, piece.ordinal, piece.offset, data)
            self.counters.bytes_received += piece.length
            self.counters.blocks_received[piece.group] += incoming.mark(piece)

    def _corrupted(self, incoming: Incoming) -> None:
        self.counters.checksum_failures += 1
        error = BatonError(
            ErrorKind.UNAVAILABLE, f"checksum of a piece of transfer {incoming.transfer_id} differs"
        )
        self._fail(incoming, WithdrawReason.CORRUPTED, error)

    def _bind(self, incoming: Incoming, link: ReceivingLink) -> None:
        incoming.cut(link.cut.geometry)
        if incoming.link is None:
            incoming.link = link
            link.transfers.add(incoming.transfer_id)

    def _record(self, link: ReceivingLink, frame: Record) -> None:
        """Binds a transfer to the link of who has its ticket; pieces, a commit or a withdrawal count from now
        on. Until the first piece its ticket can still expire."""
        incoming = self._paying(link, frame.transfer)
        if incoming is None:
            return
        if incoming.paid is not None or incoming.arrived:
            self.counters.dropped_unknown += 1
            return
        try:
            incoming.paid = check_record(frame, self._signer, self._incarnation)
        except BatonError as error:
            self._not_paid(link, incoming, error)
            return
        self._bind(incoming, link)
        if incoming.paid.described:
            self._events.append(Described(frame.transfer, incoming.paid.record))

    def _commit(self, link: ReceivingLink, commit: Commit) -> None:
        incoming = self._paying(link, commit.transfer)
        if incoming is None:
            return
        try:
            record = check_commit(commit, incoming)
        except BatonError as error:
            self._not_paid(link, incoming, error)
            return
        if incoming.under_way:
            incoming.postponed = record
            self._events.append(Announced(commit.transfer, record))
        else:
            self._accept(link, incoming, record)

    def _paying(self, link: ReceivingLink, transfer: int) -> Incoming | None:
        """The transfer that takes a record over this link; where there is none its sender is told."""
        incoming = self._incoming.get(transfer)
        if incoming is not None and not incoming.closed and incoming.link in (None, link):
            return incoming
        self.counters.dropped_unknown += 1
        # Its ticket has ended: another attempt has another one.
        unknown = Refused(transfer, ErrorKind.UNAVAILABLE, "the receiver does not expect this transfer")
        if incoming is None:
            link.tell(self._answers.get(transfer, unknown))
        elif incoming.link is not link:
            link.tell(unknown)
        return None

    def _not_paid(self, link: ReceivingLink, incoming: Incoming, error: BatonError) -> None:
        if incoming.link is None:  # whoever this is has shown no right ticket
            link.tell(Refused(incoming.transfer_id, error.kind, error.message))
        else:
            self._fail(incoming, WithdrawReason.REFUSED, error)

    def _accept(self, link: ReceivingLink, incoming: Incoming, record: CommitRecord) -> None:
        incoming.committed = True
        link.transfers.discard(incoming.transfer_id)
        self._events.append(Committed(incoming.transfer_id, record))

    def _withdraw(self, link: ReceivingLink, frame: Withdraw) -> None:
        incoming = self._incoming.get(frame.transfer)
        if incoming is None or incoming.committed or incoming.link is not link:
            self.counters.dropped_unknown += 1
            return
        _finish(incoming)
        self._drop(incoming)
        self._events.append(Withdrawn(frame.transfer, frame.reason, "the sender withdrew"))

    # -- endings ----------------------------------------------------------------------------------

    def _fail(self, incoming: Incoming, reason: WithdrawReason, error: BatonError) -> None:
        """Ends a bound transfer by the receiver's own judgement; the link goes on."""
        link = incoming.link
        assert link is not None
        _finish(incoming)
        self._drop(incoming)
        self._events.append(Withdrawn(incoming.transfer_id, reason, error.message))
        refused = Refused(incoming.transfer_id, error.kind, error.message)
        link.tell(refused)
        self._stop(link, incoming.transfer_id, StopReason.REFUSED)
        self._answers.remember(refused)

    def _drop(self, incoming: Incoming) -> None:
        del self._incoming[incoming.transfer_id]
        if incoming.link is not None:
            incoming.link.transfers.discard(incoming.transfer_id)

    def _stop(self, link: ReceivingLink, transfer_id: int, reason: StopReason) -> None:
        link.transfers.discard(transfer_id)
        link.stop(transfer_id, reason, self._clock() + self._timeout)


def _finish(incoming: Incoming) -> None:
    """Before its blocks may be another's: no device writes them any more."""
    if incoming.under_way and incoming.link is not None and incoming.link.scatter is not None:
        incoming.link.scatter.give_up(incoming.transfer_id)
