"""The sending end: reads pushed blocks piece by piece and ships them as credits allow.

    begin(ticket, body) ─▶ transfer.push … transfer.commit ─▶ Acknowledged
                                   └──── transfer.withdraw        Failed(error) at any time before

One thread, the engine's loop, calls everything here and on the transfers. It calls `poll` whenever
`wake` was called, and at least every 100 ms, since deadlines are noticed nowhere else. There is one
link for each (address, receiver incarnation), opened when first needed. A link that breaks fails its
transfers at once; the next `begin` opens another. Where the receiver can be reached in several ways, a link
that broke is followed by one over the next of them. A better way is tried again beside it after a pause
(`fallbacks`); once that link is open, new transfers go over it, and the other ends with its last transfer.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkAudit
from kvtransfer.link.interfaces import Connector
from kvtransfer.protocol.frames import (
    Committed,
    Quiet,
    ReceiverFrame,
    Refused,
    Stop,
    StopReason,
    WithdrawReason,
)
from kvtransfer.protocol.handshake import open_request
from kvtransfer.sender.counters import SenderCounters
from kvtransfer.sender.events import Acknowledged, Failed, SenderEvent
from kvtransfer.sender.fallbacks import Fallbacks, LinkKey
from kvtransfer.sender.link import SendingLink
from kvtransfer.sender.routes import Route, routes
from kvtransfer.sender.transfer import BlockSource, Transfer, TransferState
from kvtransfer.transports.ipc.control import TRANSPORT as IPC
from kvtransfer.transports.registry import connectors_of

_LOG = logging.getLogger(__name__)

# Frames a link's receiver may have handled in one poll; the rest waits for the next.
_FRAMES_A_POLL = 256


class Sender:
    """One sender of one incarnation: its links and transfers."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        fingerprint: bytes,
        block_bytes: Sequence[int],
        source: BlockSource,
        peer_timeout_s: float,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        connectors: Sequence[Connector] | None = None,
    ) -> None:
        self.counters = SenderCounters([0] * len(block_bytes))
        self._identity = identity
        self._fingerprint = fingerprint
        self._block_bytes = tuple(block_bytes)
        self._source = source
        self._timeout = peer_timeout_s
        self._wake = wake
        self._clock = clock
        self._connectors = connectors if connectors is not None else connectors_of("auto", wake)
        self._links: dict[LinkKey, SendingLink] = {}
        self._fallbacks = Fallbacks()
        # Links that are being opened over a better way than the link in use; links that were replaced so.
        self._returning: dict[LinkKey, SendingLink] = {}
        self._leaving: list[tuple[LinkKey, SendingLink]] = []
        self._link_numbers = itertools.count(1)
        self._events: list[SenderEvent] = []

    def begin(self, ticket: Ticket, body: TicketBody) -> Transfer:
        """A transfer to the ticket's issuer; `body` is the ticket's, parsed. Never blocks.

        `BatonError` INVALID for a ticket that no transfer can be made of.
        """
        if not body.transfer_address:
            raise BatonError(ErrorKind.INVALID, "the ticket names no address to send to")
        if len(body.block_counts) != len(self._block_bytes):
            raise BatonError(
                ErrorKind.INVALID,
                f"the ticket has {len(body.block_counts)} cache groups, this sender {len(self._block_bytes)}",
            )
        transfer = Transfer(
            ticket, body, self._block_bytes, self._source, self._shipped, self._withdrawn, self._wake
        )
        key = (body.transfer_address, body.issuer.incarnation)
        link = self._links.get(key)
        if link is None:
            link = self._open(key, body.issuer)
        if body.transfer_id in link.transfers:
            raise BatonError(ErrorKind.CONFLICT, f"transfer {body.transfer_id} is under way")
        link.add(transfer)
        return transfer

    def poll(self, max_pieces: int) -> list[SenderEvent]:
        """Handles what receivers said and ships at most `max_pieces` pieces or commits; never blocks."""
        now = self._clock()
        left = self._ship(max_pieces, now)  # first: a wire may stand still for it
        more = False
        # The newest first: where several to one address have opened meanwhile, it breaks the others.
        for key, link in reversed(self._all()):
            if (key, link) not in self._all():
                continue
            if link.finish_opening(now):
                self._opened(key, link, now)
            if self._listen(link, now):
                more = True
            else:  # after a long pause of ours the answers lie there already: hear them all before judging
                self._look_at_deadlines(link, now)
        more |= not self._ship(left, now)
        for key, link in self._all():
            link.take_read()
            link.keep_awake()
            if link.broken is not None:
                self._break(key, link, link.broken)
        self._change_transports(now)
        if more:
            self._wake()
        events, self._events = self._events, []
        return events

    @property
    def links(self) -> list[LinkAudit]:
        return [link.audit() for _, link in self._all()]

    @property
    def restless(self) -> bool:
        """Whether to poll again within microseconds: a device has something to do that wakes nobody."""
        return any(link.restless() for _, link in self._all())

    @property
    def pinned_blocks(self) -> int:
        """Pushes that have not been unpinned yet."""
        return sum(transfer.queued_blocks for _, link in self._all() for transfer in link.transfers.values())

    def close(self) -> None:
        """Fails every transfer, unpins their blocks, closes every link."""
        for key, link in self._all():
            self._break(key, link, BatonError(ErrorKind.UNAVAILABLE, "the sender closes"))
        for key in list(self._returning):
            self._returning.pop(key).close()

    # -- links ------------------------------------------------------------------------------------

    def _all(self) -> list[tuple[LinkKey, SendingLink]]:
        """Links that have or may have transfers."""
        return [*self._leaving, *self._links.items()]

    def _open(self, key: LinkKey, peer: WorkerIdentity) -> SendingLink:
        if (opening := self._returning.pop(key, None)) is not None:
            opening.close()
        passed_over = self._fallbacks.passed_over(key, self._clock())
        link = self._links[key] = self._link(key, peer, self._ways(key)[passed_over:], beside=False)
        return link

    def _link(
        self, key: LinkKey, peer: WorkerIdentity, ways: Sequence[Route], *, beside: bool
    ) -> SendingLink:
        number = next(self._link_numbers)
        request = open_request(self._identity, key[1], self._fingerprint, number, beside=beside)
        return SendingLink(
            ways, peer, request, self._block_bytes, self._timeout, self._clock(), self._wake
        )  # fmt: skip

    def _ways(self, key: LinkKey) -> tuple[Route, ...]:
        return routes(key[0], self._connectors)

    def _rank(self, key: LinkKey, link: SendingLink) -> int:
        """How many of the receiver's ways are better than this link's."""
        return [way.transport for way in self._ways(key)].index(link.transport)

    def _opened(self, key: LinkKey, link: SendingLink, now: float) -> None:
        """The receiver at this address is the incarnation we know now: links to others of it are dead."""
        self.counters.links_opened += 1
        if rank := self._rank(key, link):
            reason = link.unreached or self._fallbacks.reason(key)
            self.counters.link_fallbacks += 1
            facts = {"receiver": link.peer.name, "transport": link.transport, "reason": reason}
            _LOG.warning("link_fallback", extra=facts)
            if link.unreached:
                self._fallbacks.fall(key, rank, reason, now)
        for other, stale in self._all():
            if other[0] == key[0] and other != key:
                error = BatonError(ErrorKind.UNAVAILABLE, f"the receiver at {key[0]} has restarted")
                self._break(other, stale, error)

    def _break(self, key: LinkKey, link: SendingLink, error: BatonError) -> None:
        if self._links.get(key) is link:
            del self._links[key]
            following = self._rank(key, link) + 1
            passed_over = following if following < len(self._ways(key)) else 0  # the best has its turn again
            self._fallbacks.fall(key, passed_over, error.message, self._clock())
        elif (key, link) in self._leaving:
            self._leaving.remove((key, link))
        else:
            return  # broken before, within this poll
        self.counters.links_broken += 1
        facts = {"receiver": link.peer.name, "transport": link.transport, "reason": error.message}
        _LOG.info("link_ended", extra=facts)
        for transfer in list(link.transfers.values()):
            self._fail(link, transfer, error)
        link.close()

    def _change_transports(self, now: float) -> None:
        """Tries better ways whose pause is over, and ends links that were replaced."""
        for key, link in self._links.items():
            if key not in self._returning and link.is_open and self._fallbacks.due(key, now):
                ways = self._ways(key)[: self._rank(key, link)]
                self._returning[key] = self._link(key, link.peer, ways, beside=True)
        for key, link in list(self._returning.items()):
            if link.finish_opening(now):
                self._return(key, link, now)
            link.check_deadline(now)
            if link.broken is not None:
                del self._returning[key]
                self._fallbacks.fall(key, self._rank_in_use(key), link.broken.message, now)
                link.close()
        for key, link in [one for one in self._leaving if one[1].at_rest]:
            self._leaving.remove((key, link))
            link.close()

    def _rank_in_use(self, key: LinkKey) -> int:
        link = self._links.get(key)
        return self._rank(key, link) if link is not None else 0

    def _return(self, key: LinkKey, link: SendingLink, now: float) -> None:
        """The link over a better way is open: new transfers go over it."""
        del self._returning[key]
        facts = {"receiver": link.peer.name, "transport": link.transport}
        if (replaced := self._links.get(key)) is not None:
            facts["replaced"] = replaced.transport
            self._leaving.append((key, replaced))
        self._links[key] = link
        self.counters.links_opened += 1
        self.counters.links_returned += 1
        if rank := self._rank(key, link):
            self._fallbacks.fall(key, rank, link.unreached, now)
        else:
            self._fallbacks.returned(key, now)
        _LOG.info("link_returned", extra=facts)

    def _look_at_deadlines(self, link: SendingLink, now: float) -> None:
        link.check_deadline(now)
        for transfer in [late for late in link.transfers.values() if now >= late.commit_deadline]:
            link.withdraw(transfer, WithdrawReason.ABORTED)
            text = f"receiver {link.peer.name!r} did not answer a commit for {self._timeout:g} s"
            self._fail(link, transfer, BatonError(ErrorKind.DEADLINE, text))

    # -- frames -----------------------------------------------------------------------------------

    def _listen(self, link: SendingLink, now: float) -> bool:
        """Handles frames of one link; True if there may be more."""
        for _ in range(_FRAMES_A_POLL):
            frame = link.hear(now)
            if frame is None:
                return False
            self._handle(link, frame)
            if self._events:  # somebody waits for it
                return True
        return True

    def _handle(self, link: SendingLink, frame: ReceiverFrame) -> None:
        match frame:
            case Stop(transfer_id, reason):
                self._end_by_receiver(link, transfer_id, _stopped(reason))
                link.tell(Quiet(transfer_id))
            case Refused(transfer_id, kind, text):
                self._end_by_receiver(link, transfer_id, BatonError(kind, text))
            case Committed(transfer_id, at_ns):
                transfer = link.transfers.get(transfer_id)
                if transfer is None or transfer.state is not TransferState.COMMITTING:
                    self.counters.dropped_unknown += 1
                    return
                transfer.end(TransferState.ACKNOWLEDGED)
                link.remove(transfer)
                self.counters.transfers_acknowledged += 1
                now_ns = time.monotonic_ns()
                at_ns = min(at_ns, now_ns) if link.transport == IPC else now_ns  # else its clock is not ours
                self._events.append(Acknowledged(transfer, link.transport, at_ns))

    def _end_by_receiver(self, link: SendingLink, transfer_id: int, error: BatonError) -> None:
        transfer = link.transfers.get(transfer_id)
        if transfer is None:
            self.counters.dropped_unknown += 1
        else:
            self._fail(link, transfer, error)

    def _ship(self, max_pieces: int, now: float) -> int:
        """One piece a link in turn; how many of `max_pieces` are left, 0 if more could go at once."""
        able = deque(link for _, link in self._all())
        for shipped in range(max_pieces):
            while able and not able[0].step(self._source, now):
                able.popleft()
            if not able:
                return max_pieces - shipped
            able.rotate(-1)
        return 0

    # -- transfers --------------------------------------------------------------------------------

    def _fail(self, link: SendingLink, transfer: Transfer, error: BatonError) -> None:
        transfer.end(TransferState.FAILED)
        link.remove(transfer)
        self.counters.bytes_abandoned += transfer.bytes_partial
        self.counters.transfers_failed += 1
        self._events.append(Failed(transfer, error))

    def _shipped(self, group: int) -> None:
        self.counters.blocks_shipped[group] += 1
        self.counters.bytes_shipped += self._block_bytes[group]

    def _withdrawn(self, transfer: Transfer, reason: WithdrawReason) -> None:
        self.counters.bytes_abandoned += transfer.bytes_partial
        for _, link in self._all():
            if link.transfers.get(transfer.transfer_id) is transfer:
                link.withdraw(transfer, reason)


def _stopped(reason: StopReason) -> BatonError:
    if reason is StopReason.REFUSED:
        return BatonError(ErrorKind.UNAVAILABLE, "the receiver refused the transfer")
    return BatonError(ErrorKind.CONFLICT, "the receiver no longer expects this transfer")
