"""One link at its receiver: staging, credits, and the transfers that its sender must fall silent about.

    open ──break_off──▶ broken: what the sender held is quarantined ──fenced──▶ gone, the window with it

A link breaks when its stream ends, a frame is malformed, a deadline passes, or its sender opens a
newer one. Nothing but the wire's own proof that no byte can land any more ends the quarantine.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from baton.device.stream import Event
from baton.errors import BatonError
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkAudit
from kvtransfer.device.scatter import DeviceScatter, Ended
from kvtransfer.link.interfaces import LandingWire, ReceiverWire
from kvtransfer.link.staging import Owner, Staging
from kvtransfer.protocol.checksum import PieceChecksum
from kvtransfer.protocol.frames import Credit, Piece, Quiet, ReceiverFrame, SenderFrame, Stop, StopReason
from kvtransfer.protocol.piece_geometry import Geometry

# Stopped transfers a link waits for; beyond it the oldest goes, and costs another STOP if it still sends.
MAX_DRAINING = 1024


class Cut:
    """How blocks travel over a link: in pieces of this geometry, so many at a time."""

    def __init__(self, geometry: Geometry, window_pieces: int) -> None:
        self.geometry = geometry
        self.window_pieces = window_pieces
        self.checksum = PieceChecksum(geometry.piece_bytes)


class ReceivingLink:
    """What the receiver knows of one sender. Owned by the loop."""

    def __init__(
        self,
        link_id: int,
        peer: WorkerIdentity,
        transport: str,
        staging: Staging,
        wire: ReceiverWire,
        attach_deadline: float,
        cut: Cut,
        scatter: DeviceScatter | None = None,
        number: int = 0,
    ) -> None:
        """`scatter`: where staging is a device's memory; then `wire` is a `LandingWire`. `number`: of its
        sender's links."""
        self.link_id = link_id
        self.peer = peer
        self.number = number
        self.staging = staging
        self.attach_deadline = attach_deadline
        self.cut = cut
        self.scatter = scatter
        # Transfers bound to this link and not yet committed.
        self.transfers: set[int] = set()
        self.transport = transport
        self._wire = wire
        self._landing = cast(LandingWire, wire)  # where there is a scatter
        self._draining: OrderedDict[int, float] = OrderedDict()
        self._freed: list[int] = []
        # Credits go back in batches small enough to keep the sender busy; one alone, when all else is said.
        self._batch = max(2, staging.pieces // 8)

    def hear(self) -> SenderFrame | None:
        return self._wire.hear()

    def tell(self, frame: ReceiverFrame) -> None:
        self._wire.tell(frame)

    def land(self) -> None:
        """A device begins to move what is there by now."""
        if self.scatter is not None:
            self.scatter.land(self._landing.landed())

    def ended(self) -> list[Ended]:
        """What has become of pieces that were announced; each is to be released."""
        if self.scatter is None:
            return []
        self.land()
        return self.scatter.ended(self._landing.checksum)

    def arrival(self, piece: Piece) -> Event | None:
        """When the bytes of the piece that was heard last are there, where a device knows."""
        return self._landing.arrival(piece)

    def checksum(self, piece: Piece) -> int:
        """Of a piece that has landed."""
        return self._landing.checksum(piece)

    def release(self, index: int) -> None:
        """The receiver is done with this staging index; `flush` tells the sender."""
        self.staging.give_back(index)
        self._freed.append(index)

    def flush_batch(self) -> None:
        """Gives them back where they are many enough for a frame."""
        if len(self._freed) >= self._batch:
            self.flush()

    def flush(self) -> None:
        """Gives all freed indices back to the sender."""
        if self._freed:
            self._wire.tell(Credit(tuple(self._freed)))
            self._freed.clear()

    def stop(self, transfer_id: int, reason: StopReason, deadline: float) -> None:
        """Asks the sender to fall silent about a transfer, once."""
        if transfer_id in self._draining:
            return
        if len(self._draining) >= MAX_DRAINING:
            self._draining.popitem(last=False)
        self._draining[transfer_id] = deadline
        self._wire.tell(Stop(transfer_id, reason))

    def quiet(self, frame: Quiet) -> bool:
        """The sender's answer; False if nobody waited for it."""
        return self._draining.pop(frame.transfer, None) is not None

    def overdue(self, now: float) -> str | None:
        """What this sender should have done by now, if anything."""
        if not self._wire.attached() and now >= self.attach_deadline:
            return "the sender opened a link and never came to it"
        if self._draining and now >= next(iter(self._draining.values())):
            return "the sender did not answer a stop"
        return None

    def broken(self) -> BatonError | None:
        return self._wire.broken()

    def break_off(self, error: BatonError) -> None:
        """Closes the wire; what the sender could still write is quarantined."""
        self._wire.close(error)
        self.staging.quarantine()
        self._draining.clear()
        self._freed.clear()

    def fenced(self) -> bool:
        return self._wire.fenced()

    def let_go(self) -> None:
        """The link is fenced: its window is nobody's any more."""
        self.staging.release()
        if self.scatter is not None:
            self.scatter.release()

    def restless(self, *, awaited: bool) -> bool:
        """Whether a device has something under way, or may begin to where a transfer is `awaited`, that wakes
        nobody."""
        moves = self.scatter is not None and (awaited or self.scatter.under_way)
        return moves or self._wire.restless()

    def audit(self) -> LinkAudit:
        return LinkAudit(
            sending=False,
            peer=self.peer,
            transport=self.transport,
            window_pieces=self.staging.pieces,
            free_pieces=0,
            credited_pieces=self.staging.count(Owner.SENDER),
            quarantined_pieces=self.staging.count(Owner.QUARANTINED),
            live_transfers=len(self.transfers),
        )
