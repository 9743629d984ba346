"""The receiving end: verifies pieces in staging, scatters them, and says when a transfer is whole.

    expect(id, counts) ─▶ Arrived ─▶ Committed ─▶ acknowledge(id) or refuse(id, error)
                              └────▶ Withdrawn        forget(id) at any time

One thread, the engine's loop, calls everything here. It calls `poll` whenever `wake` was called, and
at least every 100 ms, since deadlines are noticed nowhere else. The sink sees a byte only after the
checksum of its piece was right, only while its transfer is expected, and each byte once: after
`forget` or `Withdrawn` not one more, so the blocks may be reused at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from google.protobuf.message import DecodeError

from baton.device.link_device import Memory
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.transfer_pb2 import CommitRecord, OpenLinkResponse
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkAudit
from kvtransfer import frames
from kvtransfer.counters import ReceiverCounters
from kvtransfer.device_blocks import DeviceSink
from kvtransfer.device_scatter import DeviceScatter
from kvtransfer.events import Arrived, Committed, ReceiverEvent, Withdrawn
from kvtransfer.frames import (
    Commit,
    FrameError,
    Piece,
    Quiet,
    Refused,
    SenderFrame,
    StopReason,
    Withdraw,
    WithdrawReason,
)
from kvtransfer.geometry import Geometry
from kvtransfer.incoming import Incoming
from kvtransfer.opening import agree
from kvtransfer.receiving_link import Cut, ReceivingLink
from kvtransfer.staging import Staging
from kvtransfer.ticket import TicketSigner
from kvtransfer.transport import Listener, OpenCall
from kvtransfer.transports import listeners_of

_LOG = logging.getLogger(__name__)

# Answers kept for commits that come twice.
_REMEMBERED_ANSWERS = 4096
# Links that may exist at once, quarantined ones included: bounds staging memory and threads.
MAX_LINKS = 64


class BlockSink(Protocol):
    """Where verified bytes go: the engine process, which knows the blocks behind a transfer."""

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        """Copies `data` to `offset` of the transfer's `ordinal`-th block of `group`; then `data` is void."""


class Receiver:
    """One receiver of one incarnation: its listener, links and expected transfers."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        fingerprint: bytes,
        signer: TicketSigner,
        block_bytes: Sequence[int],
        piece_bytes: int,
        window_pieces: int,
        sink: BlockSink,
        wake: Callable[[], None],
        peer_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        device: DeviceSink | None = None,
    ) -> None:
        """`device`: where the blocks lie in a device's memory, to which a sender's device may write."""
        if window_pieces < 2:
            raise ValueError("window_pieces must be at least 2")
        self.counters = ReceiverCounters([0] * len(block_bytes))
        self._identity = identity
        self._fingerprint = fingerprint
        self._signer = signer
        self._cut = Cut(Geometry.of(block_bytes, piece_bytes), window_pieces)
        self._device = device
        if device is not None:
            geometry = Geometry.of(block_bytes, device.piece_bytes)
            self._device_cut = Cut(geometry, device.window_pieces)
        self._sink = sink
        self._wake = wake
        self._timeout = peer_timeout_s
        self._clock = clock
        self._listeners: list[Listener] = []
        self._links: list[ReceivingLink] = []
        self._quarantined: list[ReceivingLink] = []
        self._incoming: dict[int, Incoming] = {}
        self._answers: OrderedDict[int, frames.Committed | Refused] = OrderedDict()
        self._events: list[ReceiverEvent] = []
        self._link_ids = iter(range(1 + secrets.randbits(48), 1 << 63))

    def listen(self, host: str, port: int = 0, transport: str = "grpc") -> str:
        """Starts `listeners_of` a transport; the address for tickets (its form: `kvtransfer/routes.py`)."""
        bounds = self._cut.geometry.piece_bytes, self._timeout, MAX_LINKS
        device = self._device.blocks.device if self._device is not None else None
        started = listeners_of(transport, host, port, *bounds, self._wake, device)
        self._listeners += started
        return " ".join(listener.address for listener in started)

    def attach(self, listener: Listener) -> None:
        """Takes links from this listener too, and owns it from now on."""
        self._listeners.append(listener)

    def expect(self, transfer_id: int, block_counts: Sequence[int], held: Sequence[int] = ()) -> None:
        """From now on takes this transfer's bytes: so many blocks of each cache group, but for the first
        `held` of them, which are never written."""
        if transfer_id in self._incoming or transfer_id in self._answers:
            raise BatonError(ErrorKind.CONFLICT, f"transfer {transfer_id} was given out before")
        held = held or [0] * len(block_counts)
        self._incoming[transfer_id] = Incoming(
            transfer_id, block_counts, held, len(self._cut.geometry.block_bytes)
        )

    def forget(self, transfer_id: int) -> None:
        """Not one more byte of this transfer reaches the sink, no later poll speaks of it. Idempotent. Waits for
        a device that moves pieces of it at this moment."""
        incoming = self._incoming.pop(transfer_id, None)
        self._events = [event for event in self._events if event.transfer_id != transfer_id]
        if incoming is None:
            return
        if incoming.link is not None:
            _finish(incoming)
            self._stop(incoming.link, transfer_id, StopReason.FORGOTTEN)

    def acknowledge(self, transfer_id: int) -> None:
        """Accepts a commit: the sender is told, the transfer is over."""
        self._answer(transfer_id, frames.Committed(transfer_id))
        self.counters.transfers_committed += 1

    def refuse(self, transfer_id: int, error: BatonError) -> None:
        """Turns a commit down: the sender is told why, the transfer is over."""
        self._answer(transfer_id, Refused(transfer_id, error.kind, error.message))

    def poll(self, max_pieces: int) -> list[ReceiverEvent]:
        """Does what can be done at once, at most `max_pieces` frames of it; never blocks on a peer."""
        self.land(max_pieces)
        events, self._events = self._events, []
        return events

    def land(self, max_pieces: int) -> None:
        """The same, but what there is to tell waits for the next `poll`."""
        self._take_calls()
        for link in list(self._links):
            self._take_moved(link)
        budget = max_pieces
        speaking = deque(self._links)
        while speaking and budget > 0:
            link = speaking.popleft()
            if self._step(link):
                speaking.append(link)
                budget -= 1
        for link in self._links:
            if link.scatter is not None:
                link.scatter.launch()
            link.flush()
        # Who has more to say is not judged yet: the answer may be among it.
        self._take_breaks(judged=[link for link in self._links if link not in speaking])
        if speaking:
            self._wake()
        # The next poll starts with another link, so that none of them is always last.
        self._links = self._links[1:] + self._links[:1]

    @property
    def links(self) -> list[LinkAudit]:
        """Every link, quarantined ones included."""
        return [link.audit() for link in (*self._links, *self._quarantined)]

    @property
    def restless(self) -> bool:
        """Whether to poll again within microseconds: a device has something under way that wakes nobody."""
        return any(link.restless() for link in self._links)

    @property
    def expected_transfers(self) -> int:
        return len(self._incoming)

    def close(self) -> None:
        """Breaks every link and ends every thread."""
        for listener in self._listeners:
            listener.close()
        for link in list(self._links):
            self._break(link, BatonError(ErrorKind.UNAVAILABLE, "the receiver closes"))
        self._events.clear()
        self._take_breaks(judged=[])

    # -- links ------------------------------------------------------------------------------------

    def _take_calls(self) -> None:
        for listener in self._listeners:
            while (call := listener.next_call()) is not None:
                try:
                    self._open(listener, call)
                except BatonError as error:
                    self.counters.links_refused += 1
                    _LOG.warning("refused a link: %s", error.message)
                    call.refuse(error)

    def _open(self, listener: Listener, call: OpenCall) -> None:
        sender = call.request.sender
        protocol = agree(call.request, self._identity, self._fingerprint)
        newer = BatonError(ErrorKind.UNAVAILABLE, f"sender {sender.name!r} opened a newer link")
        for link in [link for link in self._links if link.peer.name == sender.name]:
            self._break(link, newer)
        if len(self._links) + len(self._quarantined) >= MAX_LINKS:
            raise BatonError(ErrorKind.OVERLOADED, f"the receiver has {MAX_LINKS} links already")
        on_device = self._device if call.device is not None else None
        cut = self._cut if on_device is None else self._device_cut
        response = OpenLinkResponse(
            receiver=self._identity,
            protocol=protocol,
            link_id=next(self._link_ids),
            piece_bytes=cut.geometry.piece_bytes,
            window_pieces=cut.window_pieces,
        )
        size = cut.window_pieces, cut.geometry.piece_bytes
        window = call.window(*size)
        scatter = None
        if on_device is not None:
            scatter = DeviceScatter(on_device, cast(Memory, window))
        staging = Staging(*size, window)
        wire = call.grant(response, staging)
        attach_deadline = self._clock() + self._timeout
        self._links.append(
            ReceivingLink(
                response.link_id, sender, listener.transport, staging, wire, attach_deadline, cut, scatter
            )
        )
        self.counters.links_opened += 1

    def _break(self, link: ReceivingLink, error: BatonError) -> None:
        if link.scatter is not None:  # what was heard before the break still counts
            link.scatter.finish()
            self._take_moved(link)
        self._links.remove(link)
        self._quarantined.append(link)
        link.break_off(error)
        self.counters.links_broken += 1
        _LOG.info("link with sender %r ends: %s", link.peer.name, error.message)
        for transfer_id in sorted(link.transfers):
            del self._incoming[transfer_id]
            self._events.append(Withdrawn(transfer_id, WithdrawReason.LINK_LOST, error.message))
        link.transfers.clear()
        for incoming in self._incoming.values():
            if incoming.link is link:  # committed: it stays, there is only nobody left to tell
                incoming.link = None

    def _take_breaks(self, judged: list[ReceivingLink]) -> None:
        now = self._clock()
        for link in judged:
            if (overdue := link.overdue(now)) is not None:
                self._break(link, BatonError(ErrorKind.DEADLINE, overdue))
        for link in [link for link in self._quarantined if link.fenced()]:
            self._quarantined.remove(link)
            link.let_go()
            self.counters.links_fenced += 1

    # -- frames -----------------------------------------------------------------------------------

    def _step(self, link: ReceivingLink) -> bool:
        """Works on one frame of a link; False if it had none."""
        if link not in self._links:
            return False
        broken = link.broken()  # asked first: what was heard before the break still counts
        frame = link.hear()
        if frame is not None:
            try:
                self._handle(link, frame)
            except FrameError as error:
                self._break(link, error)
            return True
        if broken is not None:
            self._break(link, broken)
        return False

    def _handle(self, link: ReceivingLink, frame: SenderFrame) -> None:
        match frame:
            case Piece():
                if link.scatter is not None and self._begin_move(link, link.scatter, frame):
                    return
                try:
                    self._piece(link, frame)
                finally:
                    link.release(frame.staging)
            case Commit():
                self._commit(link, frame)
            case Withdraw():
                self._withdraw(link, frame)
            case Quiet():
                self.counters.dropped_unknown += not link.quiet(frame)

    def _begin_move(self, link: ReceivingLink, scatter: DeviceScatter, piece: Piece) -> bool:
        """Leaves a piece to the device, whose place is expected; every other is looked at here (`_piece`)."""
        incoming = self._incoming.get(piece.transfer)
        if incoming is None or incoming.link not in (None, link) or incoming.closed:
            return False
        incoming.cut(link.cut.geometry)
        if not incoming.expects(piece) or incoming.has(piece):
            return False
        self._bind(incoming, link)
        incoming.under_way += 1
        scatter.add(piece, whole=incoming.mark(piece))
        return True

    def _take_moved(self, link: ReceivingLink) -> None:
        """What the device has done meanwhile: credits go home, commits that waited have their turn."""
        if link.scatter is None:
            return
        for move, right in link.scatter.ended():
            piece = move.piece
            link.release(piece.staging)
            if right:
                self.counters.bytes_received += piece.length
                self.counters.blocks_received[piece.group] += move.whole
            incoming = self._incoming.get(piece.transfer)
            if incoming is None or incoming.link is not link or incoming.committed:
                continue  # given up meanwhile
            incoming.under_way -= 1
            if not right:
                self._corrupted(incoming)
                continue
            if incoming.postponed is not None and not incoming.under_way:
                commit, incoming.postponed = incoming.postponed, None
                self._commit(link, commit)

    def _piece(self, link: ReceivingLink, piece: Piece) -> None:
        incoming = self._incoming.get(piece.transfer)
        if incoming is None or incoming.link not in (None, link) or incoming.closed:
            self.counters.dropped_unknown += 1
            if incoming is None and piece.transfer not in self._answers:
                self._stop(link, piece.transfer, StopReason.FORGOTTEN)
            return
        incoming.cut(link.cut.geometry)
        self._bind(incoming, link)
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
        if incoming.link is None:
            incoming.link = link
            link.transfers.add(incoming.transfer_id)
            self._events.append(Arrived(incoming.transfer_id))

    def _commit(self, link: ReceivingLink, commit: Commit) -> None:
        incoming = self._incoming.get(commit.transfer)
        if incoming is None or incoming.closed or incoming.link not in (None, link):
            self.counters.dropped_unknown += 1
            unknown = Refused(
                commit.transfer, ErrorKind.NOT_FOUND, "the receiver does not expect this transfer"
            )
            if incoming is None:
                link.tell(self._answers.get(commit.transfer, unknown))
            elif incoming.link is not link:
                link.tell(unknown)
            return
        if incoming.under_way:
            incoming.postponed = commit
            return
        incoming.cut(link.cut.geometry)
        try:
            record = self._check(incoming, commit)
        except BatonError as error:
            if incoming.link is None:  # whoever this is has shown neither bytes nor a right ticket
                link.tell(Refused(commit.transfer, error.kind, error.message))
            else:
                self._fail(incoming, WithdrawReason.REFUSED, error)
            return
        incoming.link = link
        incoming.committed = True
        link.transfers.discard(commit.transfer)
        self._events.append(Committed(commit.transfer, record))

    def _check(self, incoming: Incoming, commit: Commit) -> CommitRecord:
        """The record, if it pays with our own ticket and nothing is missing."""
        try:
            record = CommitRecord.FromString(commit.record)
        except DecodeError as error:
            raise BatonError(ErrorKind.INTERNAL, "the commit record cannot be read") from error
        body = self._signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
        if body.transfer_id != commit.transfer or body.issuer.incarnation != self._identity.incarnation:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another transfer")
        if record.attempt != body.attempt:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
        incoming.compare(record.block_counts, body)
        if incoming.missing_pieces:
            # Such as one whose transfer was misread on the way: another attempt may be luckier.
            raise BatonError(ErrorKind.UNAVAILABLE, f"{incoming.missing_pieces} pieces never arrived")
        return record

    def _withdraw(self, link: ReceivingLink, frame: Withdraw) -> None:
        incoming = self._incoming.get(frame.transfer)
        if incoming is None or incoming.committed or incoming.link not in (None, link):
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
        self._remember(refused)

    def _drop(self, incoming: Incoming) -> None:
        del self._incoming[incoming.transfer_id]
        if incoming.link is not None:
            incoming.link.transfers.discard(incoming.transfer_id)

    def _stop(self, link: ReceivingLink, transfer_id: int, reason: StopReason) -> None:
        link.transfers.discard(transfer_id)
        link.stop(transfer_id, reason, self._clock() + self._timeout)

    def _answer(self, transfer_id: int, answer: frames.Committed | Refused) -> None:
        incoming = self._incoming.get(transfer_id)
        if incoming is None or not incoming.committed:
            raise BatonError(ErrorKind.NOT_FOUND, f"transfer {transfer_id} waits for no answer")
        del self._incoming[transfer_id]
        self._remember(answer)
        if incoming.link is not None:
            incoming.link.tell(answer)

    def _remember(self, answer: frames.Committed | Refused) -> None:
        self._answers[answer.transfer] = answer
        if len(self._answers) > _REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)


def _finish(incoming: Incoming) -> None:
    """Before its blocks may be another's: no device writes them any more."""
    if incoming.under_way and incoming.link is not None and incoming.link.scatter is not None:
        incoming.link.scatter.finish()
