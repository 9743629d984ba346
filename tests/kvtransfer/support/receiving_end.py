"""A receiver's transfers alone: tests hand them frames and read what they send, scatter and count."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from baton.base.errors import BatonError
from baton.device.streams.stream import Event
from baton.v1.decode_pb2 import TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt
from kvtransfer.device.scatter import DeviceScatter, MovedPiece
from kvtransfer.link.staging import Staging
from kvtransfer.protocol.frames import Commit, Metadata, Piece, ReceiverFrame, SenderFrame
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import ReceiverCounters
from kvtransfer.receiver.inbound_transfer import TransferContext
from kvtransfer.receiver.link import Cut, ReceivingLink
from kvtransfer.receiver.transfers import InboundTransfers
from tests.kvtransfer.support.peers import SECRET, FakeClock, identity

# A block of the first group is two pieces; one of the second is half a piece, and a device's has two of them.
BLOCK_BYTES, PIECE_BYTES, WINDOW, TIMEOUT_S = (16, 4), 8, 16, 3.0


Place = tuple[int, int, int, int]
"""Transfer, group, ordinal and offset of a piece."""


class FakeWire:
    """Records what is sent. For a device link: its pieces' arrival events and checksums are the test's."""

    def __init__(self) -> None:
        self.reported: list[ReceiverFrame] = []
        self.checksums: dict[Piece, int] = {}
        self.arrivals: dict[Piece, Event] = {}

    def receive(self) -> SenderFrame | None:
        return None

    def send(self, frame: ReceiverFrame) -> None:
        self.reported.append(frame)

    def attached(self) -> bool:
        return True

    def failure(self) -> BatonError | None:
        return None

    def busy_poll(self) -> bool:
        return False

    def fenced(self) -> bool:
        return False

    def close(self, error: BatonError) -> None:
        """Does nothing: no peer is behind it."""

    def arrived_count(self) -> int:
        return 7

    def arrival_event(self, piece: Piece) -> Event | None:
        return self.arrivals.get(piece)

    def checksum(self, piece: Piece) -> int:
        return self.checksums[piece]


class FakeScatter:
    """Records a device's work, in order; pieces end when the test ends them."""

    busy = False

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.ends: list[MovedPiece] = []
        self.lost: list[Piece] = []

    def begin(self, piece: Piece, blocks: int, whole_blocks: int, arrival: Event | None = None) -> None:
        self.calls.append(("begin", piece, blocks, whole_blocks, arrival))

    def keep_in_staging(self, piece: Piece) -> None:
        self.calls.append(("keep_in_staging", piece))

    def drop(self, piece: Piece) -> None:
        self.calls.append(("drop", piece))

    def start(self, count: int) -> None:
        self.calls.append(("start", count))

    def cancel(self, transfer: int) -> None:
        self.calls.append(("cancel", transfer))

    def break_off(self) -> list[Piece]:
        self.calls.append(("break_off",))
        return self.lost

    def moved(self, reported: Callable[[Piece], int]) -> list[MovedPiece]:
        ends, self.ends = self.ends, []
        return ends

    def take_calls(self) -> list[tuple[object, ...]]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class LinkRig:
    """A link of the receiver with a fake wire and a fake device."""

    def __init__(self, name: str, *, on_device: bool = False) -> None:
        self.wire, self.scatter = FakeWire(), FakeScatter()
        self.window = np.zeros(WINDOW * PIECE_BYTES, dtype=np.uint8)
        window = self.window if on_device else None
        self.staging = Staging(WINDOW, PIECE_BYTES, window, between_devices=on_device)
        cut = Cut(PieceGeometry.of(BLOCK_BYTES, PIECE_BYTES, multi_block=on_device), WINDOW)
        scatter = cast(DeviceScatter, self.scatter) if on_device else None
        self.link = ReceivingLink(1, identity(name), "fake", self.staging, self.wire, 0.0, cut, scatter)

    def take_sent(self) -> list[ReceiverFrame]:
        """The frames sent to the sender since the last call."""
        reported, self.wire.reported = self.wire.reported, []
        return reported


class ReceivingEnd:
    """Transfers whose sink keeps what it is given."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.signer = TicketSigner(SECRET)
        self.counters = ReceiverCounters([0] * len(BLOCK_BYTES))
        self.scattered: list[tuple[int, int, int, int, bytes]] = []
        incarnation = identity("receiver").incarnation
        context = TransferContext(self.signer, incarnation, self, self.counters)
        self.transfers = InboundTransfers(context, TIMEOUT_S, self.clock)
        self.take_events = self.transfers.take_events

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        self.scattered.append((transfer_id, group, ordinal, offset, bytes(data)))

    def bind(self, rig: LinkRig, transfer: int, counts: list[int], held: list[int] | None = None) -> None:
        """Expects a transfer, whose ticket comes over this link."""
        self.transfers.expect(transfer, counts, held or [])
        self.handle(rig, Metadata(transfer, self.record(transfer, counts, held).SerializeToString()))
        assert rig.link.transfers >= {transfer}

    def ticket(self, transfer: int, counts: list[int], held: list[int] | None = None) -> TicketBody:
        return TicketBody(
            attempt=Attempt(request_id=b"r" * 16, number=1),
            issuer=identity("receiver"),
            transfer_id=transfer,
            block_counts=counts,
            resident_counts=held or [],
        )

    def record(
        self, transfer: int, counts: list[int], held: list[int] | None = None, body: TicketBody | None = None
    ) -> CommitRecord:
        """A record with a ticket of `body` alone."""
        body = body or self.ticket(transfer, counts, held)
        signed = self.signer.sign(body)
        return CommitRecord(attempt=body.attempt, ticket_body=signed.body, ticket_signature=signed.signature)

    def commit(self, rig: LinkRig, transfer: int, sent: list[int]) -> CommitRecord:
        """Handles a commit that states these numbers of sent blocks."""
        record = CommitRecord(attempt=self.ticket(transfer, []).attempt, block_counts=sent, first_token_id=7)
        self.handle(rig, Commit(transfer, record.SerializeToString()))
        return record

    def piece(self, rig: LinkRig, place: Place, data: bytes, staging: int = 0) -> Piece:
        """A piece with the right checksum."""
        checksum = rig.link.cut.checksum.of(memoryview(data), *place)
        return Piece(*place, len(data), staging, checksum)

    def send(
        self,
        rig: LinkRig,
        place: Place,
        data: bytes,
        staging: int = 0,
        *,
        wrong: bool = False,
    ) -> Piece:
        """A piece comes, whose checksum may be wrong. Over a link between devices it is announced, and its
        bytes lie in the window."""
        whole = self.piece(rig, place, data, staging)
        piece = Piece(*place, len(data), staging, whole.checksum ^ wrong)
        if rig.link.scatter is None:
            rig.staging.store(piece, memoryview(data))
        else:
            rig.staging.take(piece)
            begins = staging * PIECE_BYTES
            rig.window[begins : begins + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.handle(rig, piece)
        return piece

    def handle(self, rig: LinkRig, frame: SenderFrame) -> None:
        self.transfers.handle(rig.link, frame)
