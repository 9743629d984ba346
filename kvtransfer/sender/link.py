"""One link at its sender, and the transfers that share its credits (`credits`).

    opening (in a thread of its own) ──▶ open ──▶ broken, for good: a new link has a new id
        └────────── refused, timed out ────────────┘

Transfers take turns, one piece each, so a small one is not stuck behind a large one; none occupies more than
its part of the window.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkReport
from kvtransfer.link.interfaces import SenderWire, UnreachableError
from kvtransfer.protocol.frames import (
    Commit,
    Credit,
    Metadata,
    ReceiverFrame,
    StopAck,
    Withdraw,
    WithdrawReason,
)
from kvtransfer.sender.credits import CreditWindow
from kvtransfer.sender.routes import Route
from kvtransfer.sender.transfer import BlockSource, Transfer, TransferState


@dataclass(frozen=True, slots=True)
class _Opened:
    """Result of the opening thread. `fallback_reason`: why a route tried before could not be used."""

    response: OpenLinkResponse
    wire: SenderWire
    transport: str
    fallback_reason: str


class SendingLink:
    """A link at its sender. Owned by the loop; another thread only sets `_opened`."""

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
        """Starts opening the link over the first route that works."""
        self.peer = peer
        # The transport in use or, until the link is open, the first one that is tried.
        self.transport = routes[0].transport
        self.fallback_reason = ""
        self.failure: BatonError | None = None
        self.transfers: dict[int, Transfer] = {}
        self._timeout = timeout_s
        self._block_bytes = block_bytes
        self._window: CreditWindow | None = None
        self._pending_frames: list[Metadata | Withdraw | StopAck] = []
        self._turns: deque[Transfer] = deque()
        # When the last frame came, or the receiver last began to owe one.
        self._received_at = now
        self._opened: Future[_Opened] = Future()
        threading.Thread(
            target=_open, args=(routes, request, timeout_s, self._opened, wake),
            name="link-open", daemon=True,
        ).start()  # fmt: skip

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer to those that are shipped."""
        self.transfers[transfer.transfer_id] = transfer
        self._turns.append(transfer)

    def remove(self, transfer: Transfer) -> None:
        """Removes a transfer that has ended; its credits still return."""
        self.transfers.pop(transfer.transfer_id, None)
        if transfer in self._turns:
            self._turns.remove(transfer)

    def withdraw(self, transfer: Transfer, reason: WithdrawReason) -> None:
        """Removes the transfer and makes the receiver end it, which needs its ticket: sent first where it
        was not yet."""
        self.remove(transfer)
        if transfer.metadata is not None:
            self.send(Metadata(transfer.transfer_id, transfer.metadata))
            transfer.metadata = None
        self.send(Withdraw(transfer.transfer_id, reason))

    def send(self, frame: Metadata | Withdraw | StopAck) -> None:
        """Sends a frame about a transfer that has ended, once the link is open."""
        if self._window is None:
            self._pending_frames.append(frame)
        else:
            self._window.wire.send(frame)

    def receive(self, now: float) -> ReceiverFrame | None:
        """The next frame about a transfer; takes returned credits on the way. May set `failure`."""
        while self._window is not None and self.failure is None:
            failure = self._window.wire.failure()  # checked first: frames received before it count
            frame = self._window.wire.receive()
            if frame is None:
                if failure is not None:
                    self.failure = self._broke(failure.message)
                return None
            self._received_at = now
            if not isinstance(frame, Credit):
                return frame
            try:
                self._window.return_credits(frame)
            except BatonError as error:
                self.failure = self._broke(error.message)
        return None

    def ship_one(self, source: BlockSource, now: float) -> bool:
        """Sends the next transfer's metadata, piece (and the commit after its last one) or commit; False
        where nothing can be sent."""
        window = self._window
        if window is None or self.failure is not None:
            return False
        for _ in range(len(self._turns)):
            transfer = self._turns[0]
            self._turns.rotate(-1)
            if transfer.metadata is not None:
                window.wire.send(Metadata(transfer.transfer_id, transfer.metadata))
                transfer.metadata = None
                return True
            if transfer.has_piece():
                if window.may_put(transfer):
                    if not window.in_flight:
                        self._received_at = now
                    window.put(transfer, source)
                    self._commit(window, transfer, now)
                    window.gather()
                    return True
            elif self._commit(window, transfer, now):
                return True
        return False

    def _commit(self, window: CreditWindow, transfer: Transfer, now: float) -> bool:
        """Sends the commit once the last piece was sent; False before that."""
        if transfer.record is None or transfer.has_piece():
            return False
        self._turns.remove(transfer)
        transfer.state = TransferState.COMMITTING
        transfer.commit_deadline = now + self._timeout
        window.wire.send(Commit(transfer.transfer_id, transfer.record))
        return True

    def serve_device(self) -> None:
        """Unpins what a device has read meanwhile, and keeps it from going idle while there are transfers."""
        if self._window is not None and self.failure is None:
            self._window.collect_reads()
            if self.transfers:
                self._window.keep_warm()

    def busy_poll(self) -> bool:
        """True if the link should be polled again within microseconds."""
        return self._window is not None and self.failure is None and self._window.busy_poll()

    def finish_opening(self, now: float) -> bool:
        """True once, when the receiver has granted the link and it is open; may set `failure`."""
        if self._window is not None or self.failure is not None or not self._opened.done():
            return False
        try:
            opened = self._opened.result()
        except BatonError as error:
            self.failure = error
            return False
        wire, self.transport, self.fallback_reason = opened.wire, opened.transport, opened.fallback_reason
        try:
            self._window = CreditWindow(opened.response, wire, self._block_bytes)
        except BatonError as error:
            wire.close()
            self.failure = error
            return False
        self._received_at = now
        for frame in self._pending_frames:
            wire.send(frame)
        self._pending_frames.clear()
        return True

    def check_deadline(self, now: float) -> None:
        """Sets `failure` where the receiver took too long. Called once all its frames were received."""
        late = now - self._received_at
        if self.failure is not None:
            return
        if self._window is None:
            if late > 1.5 * self._timeout:  # the opening thread has a deadline of its own, and missed it
                self.failure = BatonError(
                    ErrorKind.DEADLINE, f"opening a link to {self.peer.name!r} took too long"
                )
        elif self._window.in_flight and late > self._timeout:
            self.failure = self._broke(f"no credit was returned for {self._timeout:g} s")

    @property
    def is_open(self) -> bool:
        """True once the receiver has granted the link, until it fails."""
        return self._window is not None and self.failure is None

    @property
    def shares_clock(self) -> bool:
        """True if both ends have one monotonic clock."""
        return self._window is not None and self._window.wire.shares_clock

    @property
    def idle(self) -> bool:
        """True if the link has no transfers, and all credits have returned."""
        return not self.transfers and (self._window is None or not self._window.in_flight)

    def close(self) -> None:
        """Breaks the wire, now or, while it is being opened, once it is there."""
        if self._window is not None:
            self._window.close()
        else:
            self._opened.add_done_callback(_close_unwanted)

    def report(self) -> LinkReport:
        """Returns the link's state for the worker's integrity report."""
        window = self._window
        return LinkReport(
            sending=True,
            peer=self.peer,
            transport=self.transport,
            window_pieces=window.pieces if window else 0,
            free_pieces=len(window.credits) if window else 0,
            credited_pieces=len(window.in_flight) if window else 0,
            live_transfers=len(self.transfers),
        )

    def _broke(self, why: str) -> BatonError:
        """UNAVAILABLE: the transfers of an open link that broke may succeed over another."""
        return BatonError(ErrorKind.UNAVAILABLE, f"the link to {self.peer.name!r} broke: {why}")


def _open(
    routes: Sequence[Route], request: OpenLinkRequest, timeout_s: float,
    opened: Future[_Opened], wake: Callable[[], None],
) -> None:  # fmt: skip
    try:
        opened.set_result(_open_first(routes, request, timeout_s))
    except BatonError as error:
        if error.kind is ErrorKind.UNAUTHENTICATED:  # clients would take it for their own credentials
            error = BatonError(ErrorKind.UNAVAILABLE, error.message)
        opened.set_exception(error)
    except Exception as error:  # a bug in the transport: the transfers must still fail
        opened.set_exception(BatonError(ErrorKind.INTERNAL, f"opening a link: {error!r}"))
    wake()


def _open_first(routes: Sequence[Route], request: OpenLinkRequest, timeout_s: float) -> _Opened:
    """Opens a link over the first route by which the receiver can be reached at all."""
    reason = ""
    for route in routes:
        try:
            response, wire = route.connector.open(route.endpoint, request, timeout_s)
        except UnreachableError as error:
            reason = error.message
            continue
        return _Opened(response, wire, route.transport, reason)
    raise BatonError(ErrorKind.UNAVAILABLE, reason)


def _close_unwanted(opened: Future[_Opened]) -> None:
    if opened.exception() is None:
        opened.result().wire.close()
