"""All links of one receiver: granted, open, and after they break quarantined until they are fenced.

A worker has one link here: a newer one, of the same incarnation or a later one, breaks the older. Only a
sender that changes the transport has two, until the transfers of the older one have ended. The receiver
decides what happens to the transfers of a link that breaks (`before_break`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from typing import cast

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkResponse
from baton.v1.worker_pb2 import LinkReport
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.device.scatter import DeviceScatter
from kvtransfer.link.interfaces import LinkRequest, Listener
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.handshake import agree, is_newer, same_worker
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.receiver.events import ReceiverCounters
from kvtransfer.receiver.link import Cut, ReceivingLink

_LOG = logging.getLogger(__name__)

# Links with a whole window of staging pieces in host memory; further ones get an eighth. With 256 links of
# 32 MiB windows the staging memory is at most 2.75 GiB.
FULL_WINDOWS = 64
_SMALL_WINDOW = 8
_FEWEST_PIECES = 2


class LinkGrants:
    """Grants the links of one receiver: whose memory they get, and how blocks are cut over them."""

    def __init__(self, settings: LinkSettings, window: WindowSettings, device: DeviceSink | None) -> None:
        if window.pieces < _FEWEST_PIECES:
            raise ValueError("a window has at least 2 pieces")
        self.cut = Cut(PieceGeometry.of(settings.block_bytes, window.piece_bytes), window.pieces)
        self._small_cut = Cut(self.cut.geometry, max(_FEWEST_PIECES, window.pieces // _SMALL_WINDOW))
        self._receiver = settings.identity
        self._device = device
        if device is not None:
            self._device_cut = Cut(
                PieceGeometry.of(settings.block_bytes, device.piece_bytes, multi_block=True),
                device.window_pieces,
            )
        self._link_ids = iter(range(1 + secrets.randbits(48), 1 << 63))

    def grant(
        self, request: LinkRequest, transport: str, protocol: int, attach_deadline: float, others: int
    ) -> ReceivingLink:
        """Grants a link. `others`: links that exist. BatonError(OVERLOADED) where there is no memory."""
        on_device = self._device if request.device is not None else None
        if on_device is not None:
            cut = self._device_cut
        else:
            cut = self.cut if others < FULL_WINDOWS else self._small_cut
        response = OpenLinkResponse(
            receiver=self._receiver,
            protocol=protocol,
            link_id=next(self._link_ids),
            piece_bytes=cut.geometry.piece_bytes,
            window_pieces=cut.window_pieces,
        )
        window = request.window(cut.window_pieces, cut.geometry.piece_bytes)
        scatter = None if on_device is None else _scatter(on_device, cast(PieceMemory, window))
        staging = Staging(
            cut.window_pieces, cut.geometry.piece_bytes, window, between_devices=on_device is not None
        )
        wire = request.grant(response, staging)
        sender, number = request.request.sender, request.request.link_number
        return ReceivingLink(
            response.link_id, sender, transport, staging, wire, attach_deadline, cut, scatter, number
        )


class LinkTable:
    """The links of a receiver. Owned by the loop, as are the listeners."""

    def __init__(
        self,
        settings: LinkSettings,
        window: WindowSettings,
        device: DeviceSink | None,
        counters: ReceiverCounters,
        clock: Callable[[], float],
        before_break: Callable[[ReceivingLink, BatonError], None],
    ) -> None:
        """`before_break` is called while a link that breaks is still open."""
        self._grants = LinkGrants(settings, window, device)
        self._settings = settings
        self._max_links = window.max_links
        self._counters = counters
        self._clock = clock
        self._before_break = before_break
        self._listeners: list[Listener] = []
        self._open: list[ReceivingLink] = []
        self._quarantined: list[ReceivingLink] = []

    def __iter__(self) -> Iterator[ReceivingLink]:
        """The open links, as of the call."""
        return iter(list(self._open))

    def __contains__(self, link: ReceivingLink) -> bool:
        return link in self._open

    def attach(self, listener: Listener) -> None:
        """Takes requests from this listener too, and owns it from now on."""
        self._listeners.append(listener)

    def take_requests(self) -> None:
        """Answers every sender that requests a link."""
        for listener in self._listeners:
            while (request := listener.next_request()) is not None:
                try:
                    self._grant(listener, request)
                except BatonError as error:
                    self._counters.links_refused += 1
                    _LOG.warning("link_refused", extra={"reason": error.message})
                    request.refuse(error)

    def _grant(self, listener: Listener, request: LinkRequest) -> None:
        asked, sender = request.request, request.request.sender
        protocol = agree(asked, self._settings.identity, self._settings.fingerprint)
        earlier = [link for link in self._open if same_worker(link.peer, sender)]
        if not all(is_newer(asked, link.peer, link.number) for link in earlier):
            raise BatonError(
                ErrorKind.UNAVAILABLE, f"a newer incarnation of sender {sender.name!r} has a link"
            )
        newer = BatonError(ErrorKind.UNAVAILABLE, f"sender {sender.name!r} opened a newer link")
        for link in earlier:
            if not asked.keep_earlier or link.peer.incarnation != sender.incarnation:
                self.break_off(link, newer)
        others = len(self._open) + len(self._quarantined)
        if others >= self._max_links:
            raise BatonError(ErrorKind.OVERLOADED, f"the receiver has {others} links already")
        deadline = self._clock() + self._settings.peer_timeout_s
        transport = listener.endpoint.transport
        self._open.append(self._grants.grant(request, transport, protocol, deadline, others))
        self._counters.links_opened += 1

    def rotate(self) -> None:
        """Makes the next poll start with another link, so that none is always last."""
        self._open = self._open[1:] + self._open[:1]

    def break_off(self, link: ReceivingLink, error: BatonError) -> None:
        """Breaks an open link, whose staging is quarantined until no peer can write to it."""
        self._before_break(link, error)
        self._open.remove(link)
        self._quarantined.append(link)
        link.break_off(error)
        self._counters.links_broken += 1
        _LOG.info(
            "link_ended",
            extra={"sender": link.peer.name, "transport": link.transport, "reason": error.message},
        )

    def break_overdue(self, candidates: list[ReceivingLink]) -> None:
        """Breaks those of the candidates whose sender missed a deadline."""
        now = self._clock()
        for link in candidates:
            if (overdue := link.overdue(now)) is not None:
                self.break_off(link, BatonError(ErrorKind.DEADLINE, overdue))

    def free_fenced(self) -> None:
        """Frees the windows of links that are fenced."""
        for link in [link for link in self._quarantined if link.wire.fenced()]:
            self._quarantined.remove(link)
            link.free_window()
            self._counters.links_fenced += 1

    def report(self) -> list[LinkReport]:
        """The state of every link, quarantined ones included."""
        return [link.report() for link in (*self._open, *self._quarantined)]

    def close(self) -> None:
        """Breaks every link and ends every thread."""
        for listener in self._listeners:
            listener.close()
        for link in self:
            self.break_off(link, BatonError(ErrorKind.UNAVAILABLE, "the receiver closes"))


def _scatter(sink: DeviceSink, window: PieceMemory) -> DeviceScatter:
    try:
        return DeviceScatter(sink, window)
    except RuntimeError as error:
        window.free()
        raise BatonError(ErrorKind.OVERLOADED, f"the device has no memory for a link: {error}") from error
