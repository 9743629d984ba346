"""The sending end: reads pushed blocks piece by piece and ships them as credits allow.

    begin(ticket, body) ─▶ transfer.push … transfer.commit ─▶ Acknowledged
                                   └──── transfer.withdraw        Failed(error) at any time before

One thread, the engine's loop, calls everything here and on the transfers. It calls `poll` whenever `wake` was
called, and at least every 100 ms, since deadlines are checked nowhere else. There is one link for each
incarnation of a receiver, opened when first needed. A link that breaks fails its transfers at once; the next
`begin` opens another, over the next route to the receiver where there are several. A better route is tried
again in parallel after a pause (`routes`); once that link is open, new transfers use it, and the other one
closes after its last transfer.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkReport
from kvtransfer.link.interfaces import Connector
from kvtransfer.link.settings import LinkSettings
from kvtransfer.protocol.addresses import from_messages, to_text
from kvtransfer.protocol.frames import (
    CommitAck,
    ReceiverFrame,
    Refused,
    Stop,
    StopAck,
    StopReason,
    WithdrawReason,
)
from kvtransfer.protocol.handshake import link_request
from kvtransfer.sender.events import Acknowledged, Failed, SenderCounters, SenderEvent
from kvtransfer.sender.link import SendingLink
from kvtransfer.sender.routes import Fallbacks, LinkKey, Route, routes
from kvtransfer.sender.transfer import BlockSource, Transfer, TransferState

_LOG = logging.getLogger(__name__)

# Frames of one link that are handled in one poll; the rest waits for the next.
_FRAMES_PER_POLL = 256


class Sender:
    """The links and transfers of one sender."""

    def __init__(
        self,
        *,
        settings: LinkSettings,
        source: BlockSource,
        wake: Callable[[], None],
        connectors: Sequence[Connector],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SenderCounters([0] * len(settings.block_bytes))
        self._settings = settings
        self._block_bytes = tuple(settings.block_bytes)
        self._source = source
        self._timeout = settings.peer_timeout_s
        self._wake = wake
        self._clock = clock
        self._connectors = connectors
        self._links: dict[LinkKey, SendingLink] = {}
        self._fallbacks = Fallbacks()
        # Links that are being opened over a better route than the one in use, and links they replaced.
        self._returning: dict[LinkKey, SendingLink] = {}
        self._leaving: list[tuple[LinkKey, SendingLink]] = []
        self._link_numbers = itertools.count(1)
        self._events: list[SenderEvent] = []

    @property
    def connectors(self) -> Sequence[Connector]:
        """The connectors by which the sender opens links."""
        return self._connectors

    def begin(self, ticket: Ticket, body: TicketBody) -> Transfer:
        """A transfer to the ticket's issuer; `body` is the ticket's, parsed. Never blocks.

        BatonError: INVALID for a ticket that is not usable, CONFLICT where no connector reaches the issuer
        or the transfer exists already.
        """
        if not body.endpoints:
            raise BatonError(ErrorKind.INVALID, "the ticket has no endpoint to send to")
        if len(body.block_counts) != len(self._block_bytes):
            raise BatonError(
                ErrorKind.INVALID,
                f"the ticket has {len(body.block_counts)} cache groups, this sender {len(self._block_bytes)}",
            )
        transfer = Transfer(
            ticket, body, self._block_bytes, self._source, self._block_shipped, self._withdrawn, self._wake
        )
        key = LinkKey(from_messages(body.endpoints), body.issuer.incarnation)
        link = self._links.get(key)
        if link is None:
            link = self._open(key, body.issuer)
        if body.transfer_id in link.transfers:
            raise BatonError(ErrorKind.CONFLICT, f"transfer {body.transfer_id} exists already")
        link.add(transfer)
        return transfer

    def poll(self, max_pieces: int) -> list[SenderEvent]:
        """Handles what receivers sent and ships at most `max_pieces` pieces or commits; never blocks."""
        now = self._clock()
        left = self._ship(max_pieces, now)  # first: an idle wire may be waiting for it
        more = False
        # The newest first: where several links to one receiver have opened meanwhile, it breaks the others.
        for key, link in reversed(self._all()):
            if (key, link) not in self._all():
                continue
            if link.finish_opening(now):
                self._opened(key, link, now)
            if self._handle_frames(link, now):
                more = True
            else:  # if this loop paused for long, the answers are here already: all are handled first
                self._check_deadlines(link, now)
        more |= not self._ship(left, now)
        for key, link in self._all():
            link.serve_device()
            if link.failure is not None:
                self._break(key, link, link.failure)
        self._change_routes(now)
        if more:
            self._wake()
        events, self._events = self._events, []
        return events

    @property
    def links(self) -> list[LinkReport]:
        """The state of every link."""
        return [link.report() for _, link in self._all()]

    @property
    def busy_poll(self) -> bool:
        """True if the sender should be polled again within microseconds: a device's work will end without a
        wake-up."""
        return any(link.busy_poll() for _, link in self._all())

    @property
    def pinned_blocks(self) -> int:
        """Pushes that have not been unpinned yet."""
        return sum(transfer.queued_blocks for _, link in self._all() for transfer in link.transfers.values())

    def close(self) -> None:
        """Fails every transfer, unpins their blocks and closes every link."""
        for key, link in self._all():
            self._break(key, link, BatonError(ErrorKind.UNAVAILABLE, "the sender closes"))
        for key in list(self._returning):
            self._returning.pop(key).close()

    # -- links ------------------------------------------------------------------------------------

    def _all(self) -> list[tuple[LinkKey, SendingLink]]:
        """Links that may have transfers."""
        return [*self._leaving, *self._links.items()]

    def _open(self, key: LinkKey, peer: WorkerIdentity) -> SendingLink:
        if (opening := self._returning.pop(key, None)) is not None:
            opening.close()
        skipped = self._fallbacks.skipped(key, self._clock())
        link = self._links[key] = self._link(key, peer, self._routes(key)[skipped:], keep_earlier=False)
        return link

    def _link(
        self, key: LinkKey, peer: WorkerIdentity, choice: Sequence[Route], *, keep_earlier: bool
    ) -> SendingLink:
        number = next(self._link_numbers)
        request = link_request(
            self._settings.identity,
            key.incarnation,
            self._settings.fingerprint,
            number,
            keep_earlier=keep_earlier,
        )
        return SendingLink(
            choice, peer, request, self._block_bytes, self._timeout, self._clock(), self._wake
        )  # fmt: skip

    def _routes(self, key: LinkKey) -> tuple[Route, ...]:
        return routes(key.endpoints, self._connectors)

    def _rank(self, key: LinkKey, link: SendingLink) -> int:
        """Number of routes to the receiver that are better than this link's."""
        return [route.transport for route in self._routes(key)].index(link.transport)

    def _opened(self, key: LinkKey, link: SendingLink, now: float) -> None:
        """Links to other incarnations at the same endpoints are dead."""
        self.counters.links_opened += 1
        if rank := self._rank(key, link):
            reason = link.fallback_reason or self._fallbacks.reason(key)
            self.counters.link_fallbacks += 1
            facts = {"receiver": link.peer.name, "transport": link.transport, "reason": reason}
            _LOG.warning("link_fallback", extra=facts)
            if link.fallback_reason:
                self._fallbacks.fall_back(key, rank, reason, now)
        for other, stale in self._all():
            if other.endpoints == key.endpoints and other != key:
                text = f"the receiver at {to_text(key.endpoints)} has restarted"
                self._break(other, stale, BatonError(ErrorKind.UNAVAILABLE, text))

    def _break(self, key: LinkKey, link: SendingLink, error: BatonError) -> None:
        if self._links.get(key) is link:
            del self._links[key]
            following = self._rank(key, link) + 1
            skipped = following if following < len(self._routes(key)) else 0  # after the last, the best again
            self._fallbacks.fall_back(key, skipped, error.message, self._clock())
        elif (key, link) in self._leaving:
            self._leaving.remove((key, link))
        else:
            return  # it broke before, within this poll
        self.counters.links_broken += 1
        facts = {"receiver": link.peer.name, "transport": link.transport, "reason": error.message}
        _LOG.info("link_ended", extra=facts)
        failed = BatonError(error.kind, error.message, cause=FailureCause.LINK)
        for transfer in list(link.transfers.values()):
            self._fail(link, transfer, failed)
        link.close()

    def _change_routes(self, now: float) -> None:
        """Tries better routes whose pause is over, and closes links that were replaced and are idle."""
        for key, link in self._links.items():
            if key not in self._returning and link.is_open and self._fallbacks.due(key, now):
                better = self._routes(key)[: self._rank(key, link)]
                self._returning[key] = self._link(key, link.peer, better, keep_earlier=True)
        for key, link in list(self._returning.items()):
            if link.finish_opening(now):
                self._return(key, link, now)
            link.check_deadline(now)
            if link.failure is not None:
                del self._returning[key]
                self._fallbacks.fall_back(key, self._rank_in_use(key), link.failure.message, now)
                link.close()
        for key, link in [one for one in self._leaving if one[1].idle]:
            self._leaving.remove((key, link))
            link.close()

    def _rank_in_use(self, key: LinkKey) -> int:
        link = self._links.get(key)
        return self._rank(key, link) if link is not None else 0

    def _return(self, key: LinkKey, link: SendingLink, now: float) -> None:
        """The link over a better route is open: new transfers use it."""
        del self._returning[key]
        facts = {"receiver": link.peer.name, "transport": link.transport}
        if (replaced := self._links.get(key)) is not None:
            facts["replaced"] = replaced.transport
            self._leaving.append((key, replaced))
        self._links[key] = link
        self.counters.links_opened += 1
        self.counters.links_returned += 1
        if rank := self._rank(key, link):
            self._fallbacks.fall_back(key, rank, link.fallback_reason, now)
        else:
            self._fallbacks.returned(key, now)
        _LOG.info("link_returned", extra=facts)

    def _check_deadlines(self, link: SendingLink, now: float) -> None:
        link.check_deadline(now)
        for transfer in [late for late in link.transfers.values() if now >= late.commit_deadline]:
            link.withdraw(transfer, WithdrawReason.ABORTED)
            text = f"receiver {link.peer.name!r} did not answer a commit for {self._timeout:g} s"
            late = BatonError(ErrorKind.DEADLINE, text, cause=FailureCause.LINK)
            self._fail(link, transfer, late)

    # -- frames -----------------------------------------------------------------------------------

    def _handle_frames(self, link: SendingLink, now: float) -> bool:
        """Handles frames of one link; True if there may be more."""
        for _ in range(_FRAMES_PER_POLL):
            frame = link.receive(now)
            if frame is None:
                return False
            self._handle(link, frame)
            if self._events:  # reported without delay
                return True
        return True

    def _handle(self, link: SendingLink, frame: ReceiverFrame) -> None:
        match frame:
            case Stop(transfer_id, reason):
                self._end_by_receiver(link, transfer_id, _stopped(reason))
                link.send(StopAck(transfer_id))
            case Refused(transfer_id, kind, text):
                self._end_by_receiver(link, transfer_id, BatonError(kind, text))
            case CommitAck(transfer_id, at_ns):
                transfer = link.transfers.get(transfer_id)
                if transfer is None or transfer.state is not TransferState.COMMITTING:
                    self.counters.dropped_unknown += 1
                    return
                transfer.end(TransferState.ACKNOWLEDGED)
                link.remove(transfer)
                self.counters.transfers_acknowledged += 1
                now_ns = time.monotonic_ns()
                at_ns = min(at_ns, now_ns) if link.shares_clock else now_ns
                self._events.append(Acknowledged(transfer, link.transport, at_ns))

    def _end_by_receiver(self, link: SendingLink, transfer_id: int, error: BatonError) -> None:
        transfer = link.transfers.get(transfer_id)
        if transfer is None:
            self.counters.dropped_unknown += 1
        else:
            self._fail(link, transfer, error)

    def _ship(self, max_pieces: int, now: float) -> int:
        """Ships one piece of each link in turn; how many of `max_pieces` are left, 0 if more could go at
        once."""
        ready = deque(link for _, link in self._all())
        for shipped in range(max_pieces):
            while ready and not ready[0].ship_one(self._source, now):
                ready.popleft()
            if not ready:
                return max_pieces - shipped
            ready.rotate(-1)
        return 0

    # -- transfers --------------------------------------------------------------------------------

    def _fail(self, link: SendingLink, transfer: Transfer, error: BatonError) -> None:
        transfer.end(TransferState.FAILED)
        link.remove(transfer)
        self.counters.bytes_abandoned += transfer.bytes_partial
        self.counters.transfers_failed += 1
        self._events.append(Failed(transfer, error))

    def _block_shipped(self, group: int) -> None:
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
