"""One link at its sender, and the transfers that share its credits (`sending_window`).

    opening (a thread of its own asks) ──▶ open ──▶ broken, final: a new link has a new id
        └──────────────── refused, too late ───────────┘

Transfers take turns, one piece each, so a small one is not stuck behind a big one; none holds more than its
share of the window.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkAudit
from kvtransfer.link.interfaces import OutOfReachError, SenderWire
from kvtransfer.protocol.frames import Commit, Credit, Quiet, ReceiverFrame, Record, Withdraw, WithdrawReason
from kvtransfer.sender.credits import SendingWindow
from kvtransfer.sender.routes import Route
from kvtransfer.sender.transfer import BlockSource, Transfer, TransferState


@dataclass(frozen=True, slots=True)
class Opened:
    """What the opening thread brings: over which transport, and why not over one tried before."""

    response: OpenLinkResponse
    wire: SenderWire
    transport: str
    unreached: str


class SendingLink:
    """Owned by the loop; only `_opened` is set by another thread."""

    def __init__(
        self,
        routes: Sequence[Route],
        peer: WorkerIdentity,
        request: OpenLinkRequest,
        block_bytes: tuple[int, ...],
        timeout_s: float,
        now: float,
        wake: Callable[[], None],
    ) -> None:
        self.peer = peer
        # The transport it is open over or, until then, the first that is tried.
        self.transport = routes[0].transport
        self.unreached = ""  # why a transport that was tried first could not be had
        self.broken: BatonError | None = None
        self.transfers: dict[int, Transfer] = {}
        self._timeout = timeout_s
        self._block_bytes = block_bytes
        self._window: SendingWindow | None = None
        self._last_words: list[Record | Withdraw | Quiet] = []
        self._turns: deque[Transfer] = deque()
        # Begins anew whenever the receiver starts to owe us something.
        self._heard_at = now
        self._opened: Future[Opened] = Future()
        threading.Thread(
            target=_open, args=(routes, request, timeout_s, self._opened, wake),
            name="link-open", daemon=True,
        ).start()  # fmt: skip

    def add(self, transfer: Transfer) -> None:
        self.transfers[transfer.transfer_id] = transfer
        self._turns.append(transfer)

    def remove(self, transfer: Transfer) -> None:
        """The transfer has ended; its credits still come home."""
        self.transfers.pop(transfer.transfer_id, None)
        if transfer in self._turns:
            self._turns.remove(transfer)

    def withdraw(self, transfer: Transfer, reason: WithdrawReason) -> None:
        """Has the receiver end the transfer, which it does for none but the owner of its ticket."""
        self.remove(transfer)
        if transfer.ahead is not None:
            self.tell(Record(transfer.transfer_id, transfer.ahead))
            transfer.ahead = None
        self.tell(Withdraw(transfer.transfer_id, reason))

    def tell(self, frame: Record | Withdraw | Quiet) -> None:
        """Sends a last word about a transfer, as soon as the link is open."""
        if self._window is None:
            self._last_words.append(frame)
        else:
            self._window.wire.tell(frame)

    def hear(self, now: float) -> ReceiverFrame | None:
        """The next frame about a transfer; credits are taken home on the way. Sets `broken`."""
        while self._window is not None and self.broken is None:
            broken = self._window.wire.broken()  # asked first: what was heard before the break counts
            frame = self._window.wire.hear()
            if frame is None:
                if broken is not None:
                    self.broken = self._lost(broken.message)
                return None
            self._heard_at = now
            if not isinstance(frame, Credit):
                return frame
            try:
                self._window.come_home(frame)
            except BatonError as error:
                self.broken = self._lost(error.message)
        return None

    def step(self, source: BlockSource, now: float) -> bool:
        """Sends one piece, with its commit behind the last, or record of the transfer whose turn it is; False
        if none can."""
        window = self._window
        if window is None or self.broken is not None:
            return False
        for _ in range(len(self._turns)):
            transfer = self._turns[0]
            self._turns.rotate(-1)
            if transfer.ahead is not None:
                window.wire.tell(Record(transfer.transfer_id, transfer.ahead))
                transfer.ahead = None
                return True
            if transfer.has_piece():
                if window.may_put(transfer):
                    if not window.in_flight:
                        self._heard_at = now
                    window.put(transfer, source)
                    self._commit(window, transfer, now)
                    window.gather()
                    return True
            elif self._commit(window, transfer, now):
                return True
        return False

    def _commit(self, window: SendingWindow, transfer: Transfer, now: float) -> bool:
        """Behind the last piece; False before that."""
        if transfer.record is None or transfer.has_piece():
            return False
        self._turns.remove(transfer)
        transfer.state = TransferState.COMMITTING
        transfer.commit_deadline = now + self._timeout
        window.wire.tell(Commit(transfer.transfer_id, transfer.record))
        return True

    def take_read(self) -> None:
        """What a device has read meanwhile is unpinned."""
        if self._window is not None and self.broken is None:
            self._window.take_read()

    def keep_awake(self) -> None:
        """While there are transfers, their device is to be ready for their blocks."""
        if self._window is not None and self.transfers and self.broken is None:
            self._window.keep_awake()

    def restless(self) -> bool:
        return self._window is not None and self.broken is None and self._window.restless()

    def finish_opening(self, now: float) -> bool:
        """True once, when the receiver's answer has come and the link is open; may set `broken`."""
        if self._window is not None or self.broken is not None or not self._opened.done():
            return False
        try:
            opened = self._opened.result()
        except BatonError as error:
            self.broken = error
            return False
        wire, self.transport, self.unreached = opened.wire, opened.transport, opened.unreached
        try:
            self._window = SendingWindow(opened.response, wire, self._block_bytes)
        except BatonError as error:
            wire.close()
            self.broken = error
            return False
        self._heard_at = now
        for frame in self._last_words:
            wire.tell(frame)
        self._last_words.clear()
        return True

    def check_deadline(self, now: float) -> None:
        """Sets `broken` where the receiver took too long. Call it when everything it said was heard."""
        late = now - self._heard_at
        if self.broken is not None:
            return
        if self._window is None:
            if late > 1.5 * self._timeout:  # the opening thread has a deadline of its own, and missed it
                self.broken = BatonError(
                    ErrorKind.DEADLINE, f"opening a link to {self.peer.name!r} took too long"
                )
        elif self._window.in_flight and late > self._timeout:
            self.broken = self._lost(f"no credit came back for {self._timeout:g} s")

    @property
    def is_open(self) -> bool:
        """Whether the receiver has granted it, and it is not broken."""
        return self._window is not None and self.broken is None

    @property
    def at_rest(self) -> bool:
        """Whether nothing goes over it: no transfers, and all credits are home."""
        return not self.transfers and (self._window is None or not self._window.in_flight)

    def close(self) -> None:
        """Breaks the wire, now or, should it be opening, as soon as it is there."""
        if self._window is not None:
            self._window.close()
        else:
            self._opened.add_done_callback(_close_unwanted)

    def audit(self) -> LinkAudit:
        window = self._window
        return LinkAudit(
            sending=True,
            peer=self.peer,
            transport=self.transport,
            window_pieces=window.pieces if window else 0,
            free_pieces=len(window.credits) if window else 0,
            credited_pieces=len(window.in_flight) if window else 0,
            live_transfers=len(self.transfers),
        )

    def _lost(self, why: str) -> BatonError:
        """Whatever broke an open link, its transfers may succeed over another."""
        return BatonError(ErrorKind.UNAVAILABLE, f"the link to {self.peer.name!r} broke: {why}")


def _open(
    routes: Sequence[Route], request: OpenLinkRequest, timeout_s: float,
    opened: Future[Opened], wake: Callable[[], None],
) -> None:  # fmt: skip
    try:
        opened.set_result(_open_first(routes, request, timeout_s))
    except BatonError as error:
        if error.kind is ErrorKind.UNAUTHENTICATED:  # which is not about the client's own credentials
            error = BatonError(ErrorKind.UNAVAILABLE, error.message)
        opened.set_exception(error)
    except Exception as error:  # a fault of the transport's: the transfers must still hear of it
        opened.set_exception(BatonError(ErrorKind.INTERNAL, f"opening a link: {error!r}"))
    wake()


def _open_first(routes: Sequence[Route], request: OpenLinkRequest, timeout_s: float) -> Opened:
    """Over the first route by which the receiver can be reached at all."""
    unreached = ""
    for route in routes:
        try:
            response, wire = route.connector.open(route.address, request, timeout_s)
        except OutOfReachError as error:
            unreached = error.message
            continue
        return Opened(response, wire, route.transport, unreached)
    raise BatonError(ErrorKind.UNAVAILABLE, unreached)


def _close_unwanted(opened: Future[Opened]) -> None:
    if opened.exception() is None:
        opened.result().wire.close()
