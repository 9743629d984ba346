"""All links of one receiver: granted, open, and after their break quarantined until they are fenced.

A worker has one link here: a newer one, of the same start of it or a later one, breaks the older. Only a
sender that changes the transport has two, until the older has ended what goes over it. What a break means to
the transfers of a link is the receiver's to say (`before_break`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from baton.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import LinkAudit
from kvtransfer.link.interfaces import Listener, OpenCall
from kvtransfer.protocol.handshake import is_newer, same_worker
from kvtransfer.receiver.counters import ReceiverCounters
from kvtransfer.receiver.link import ReceivingLink
from kvtransfer.receiver.link_grants import Granting

_LOG = logging.getLogger(__name__)

# Links that may exist at once, quarantined ones included: bounds staging memory and threads.
MAX_LINKS = 64


class ReceivingLinks:
    """Owned by the loop, as are the listeners."""

    def __init__(
        self,
        granting: Granting,
        counters: ReceiverCounters,
        timeout_s: float,
        clock: Callable[[], float],
        before_break: Callable[[ReceivingLink, BatonError], None],
    ) -> None:
        """`before_break` is called while a link that breaks is still open."""
        self._granting = granting
        self._counters = counters
        self._timeout = timeout_s
        self._clock = clock
        self._before_break = before_break
        self._listeners: list[Listener] = []
        self._open: list[ReceivingLink] = []
        self._quarantined: list[ReceivingLink] = []

    def __iter__(self) -> Iterator[ReceivingLink]:
        """Those that are open now, whatever becomes of them meanwhile."""
        return iter(list(self._open))

    def __contains__(self, link: ReceivingLink) -> bool:
        return link in self._open

    def attach(self, listener: Listener) -> None:
        """Takes links from this listener too, and owns it from now on."""
        self._listeners.append(listener)

    def take_calls(self) -> None:
        """Answers every sender that asks."""
        for listener in self._listeners:
            while (call := listener.next_call()) is not None:
                try:
                    self._grant(listener, call)
                except BatonError as error:
                    self._counters.links_refused += 1
                    _LOG.warning("link_refused", extra={"reason": error.message})
                    call.refuse(error)

    def _grant(self, listener: Listener, call: OpenCall) -> None:
        sender = call.request.sender
        protocol = self._granting.agree(call)
        earlier = [link for link in self._open if same_worker(link.peer, sender)]
        if not all(is_newer(call.request, link.peer, link.number) for link in earlier):
            raise BatonError(ErrorKind.UNAVAILABLE, f"a newer start of sender {sender.name!r} has a link")
        newer = BatonError(ErrorKind.UNAVAILABLE, f"sender {sender.name!r} opened a newer link")
        for link in earlier:
            if not call.request.keep_earlier or link.peer.incarnation != sender.incarnation:
                self.break_off(link, newer)
        if len(self._open) + len(self._quarantined) >= MAX_LINKS:
            raise BatonError(ErrorKind.OVERLOADED, f"the receiver has {MAX_LINKS} links already")
        deadline = self._clock() + self._timeout
        self._open.append(self._granting.grant(call, listener.transport, protocol, deadline))
        self._counters.links_opened += 1

    def rotate(self) -> None:
        """The next look begins with another link, so that none of them is always last."""
        self._open = self._open[1:] + self._open[:1]

    def break_off(self, link: ReceivingLink, error: BatonError) -> None:
        """Of an open link."""
        self._before_break(link, error)
        self._open.remove(link)
        self._quarantined.append(link)
        link.break_off(error)
        self._counters.links_broken += 1
        _LOG.info(
            "link_ended",
            extra={"sender": link.peer.name, "transport": link.transport, "reason": error.message},
        )

    def break_overdue(self, judged: list[ReceivingLink]) -> None:
        """Those of the judged whose sender should have done something by now."""
        now = self._clock()
        for link in judged:
            if (overdue := link.overdue(now)) is not None:
                self.break_off(link, BatonError(ErrorKind.DEADLINE, overdue))

    def let_go(self) -> None:
        """Of the windows that nobody can write any more."""
        for link in [link for link in self._quarantined if link.fenced()]:
            self._quarantined.remove(link)
            link.let_go()
            self._counters.links_fenced += 1

    def audit(self) -> list[LinkAudit]:
        """Of every link, quarantined ones included."""
        return [link.audit() for link in (*self._open, *self._quarantined)]

    def close(self) -> None:
        """Breaks every link and ends every thread."""
        for listener in self._listeners:
            listener.close()
        for link in self:
            self.break_off(link, BatonError(ErrorKind.UNAVAILABLE, "the receiver closes"))
