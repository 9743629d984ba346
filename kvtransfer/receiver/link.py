"""One link at its receiver: staging, credits, and stopped transfers that its sender must acknowledge.

    open ──break_off──▶ broken: what the sender owned is quarantined ──fenced──▶ gone, and the window freed

A link breaks when its stream ends, a frame is malformed, a deadline passes, or its sender opens a newer one.
The quarantine ends only when the wire is certain that no byte can arrive any more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from baton.base.errors import BatonError
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import LinkReport
from kvtransfer.device.scatter import DeviceScatter, MovedPiece
from kvtransfer.link.interfaces import DeviceReceiverWire, ReceiverWire
from kvtransfer.link.staging import Owner, Staging
from kvtransfer.protocol.checksum import PieceChecksum
from kvtransfer.protocol.frames import Credit, Stop, StopAck, StopReason
from kvtransfer.protocol.piece_geometry import PieceGeometry

# Stopped transfers whose acknowledgement a link waits for; beyond that the oldest is dropped, and costs
# another STOP if its sender still sends.
MAX_STOPPED = 1024


class Cut:
    """The cut of blocks on a link: pieces of this geometry, `window_pieces` at a time."""

    def __init__(self, geometry: PieceGeometry, window_pieces: int) -> None:
        self.geometry = geometry
        self.window_pieces = window_pieces
        self.checksum = PieceChecksum(geometry.piece_bytes)


class ReceivingLink:
    """The receiver's state of one link. Owned by the loop."""

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
        """`scatter`: where staging is device memory; then `wire` is a `DeviceReceiverWire`. `number`: of the
        sender's links, in the order of its requests."""
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
        self.wire = wire
        self._stopped: OrderedDict[int, float] = OrderedDict()
        self._freed: list[int] = []
        # Credits return in batches small enough to keep the sender busy; single ones only when idle.
        self._batch = max(2, staging.pieces // 8)

    @property
    def device_wire(self) -> DeviceReceiverWire:
        """The wire, where there is a `scatter`."""
        return cast(DeviceReceiverWire, self.wire)

    def start_moves(self) -> None:
        """Makes the device move pieces that have arrived by now."""
        if self.scatter is not None:
            self.scatter.start(self.device_wire.arrived_count())

    def moved(self) -> list[MovedPiece]:
        """Announced pieces that the device is done with; the caller frees their staging."""
        if self.scatter is None:
            return []
        self.start_moves()
        return self.scatter.moved(self.device_wire.checksum)

    def free(self, index: int) -> None:
        """Frees a staging index that the receiver is done with; `flush` returns it to the sender."""
        self.staging.free(index)
        self._freed.append(index)

    def flush_batch(self) -> None:
        """Returns freed indices where there are enough for a frame."""
        if len(self._freed) >= self._batch:
            self.flush()

    def flush(self) -> None:
        """Returns all freed indices to the sender."""
        if self._freed:
            self.wire.send(Credit(tuple(self._freed)))
            self._freed.clear()

    def stop(self, transfer_id: int, reason: StopReason, deadline: float) -> None:
        """Asks the sender, once, to stop sending a transfer; it must acknowledge by `deadline`."""
        if transfer_id in self._stopped:
            return
        if len(self._stopped) >= MAX_STOPPED:
            self._stopped.popitem(last=False)
        self._stopped[transfer_id] = deadline
        self.wire.send(Stop(transfer_id, reason))

    def stop_acknowledged(self, frame: StopAck) -> bool:
        """Takes the sender's acknowledgement; False if none was awaited."""
        return self._stopped.pop(frame.transfer, None) is not None

    def overdue(self, now: float) -> str | None:
        """Names an action of the sender that is overdue, or returns None."""
        if not self.wire.attached() and now >= self.attach_deadline:
            return "the sender requested a link and never connected to it"
        if self._stopped and now >= next(iter(self._stopped.values())):
            return "the sender did not acknowledge a stop"
        return None

    def break_off(self, error: BatonError) -> None:
        """Closes the wire; what the sender could still write is quarantined."""
        self.wire.close(error)
        self.staging.quarantine()
        self._stopped.clear()
        self._freed.clear()

    def free_window(self) -> None:
        """Frees the staging window of a link that is fenced."""
        self.staging.release()
        if self.scatter is not None:
            self.scatter.release()

    def busy_poll(self, *, expecting: bool) -> bool:
        """True if the link should be polled again within microseconds: a device is at work, or may start to
        where a transfer is expected, and its end causes no wake-up."""
        moves = self.scatter is not None and (expecting or self.scatter.busy)
        return moves or self.wire.busy_poll()

    def report(self) -> LinkReport:
        """Returns the link's state for the worker's integrity report."""
        return LinkReport(
            sending=False,
            peer=self.peer,
            transport=self.transport,
            window_pieces=self.staging.pieces,
            free_pieces=0,
            credited_pieces=self.staging.count(Owner.SENDER),
            quarantined_pieces=self.staging.count(Owner.QUARANTINED),
            live_transfers=len(self.transfers),
        )
