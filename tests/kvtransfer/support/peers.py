"""Two peers over one transport, driven by one thread in turns, with everything they hold in view."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from baton.base.errors import BatonError
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt, WorkerIdentity
from baton.v1.types_pb2 import Endpoint as Message
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.link.interfaces import Connector, Listener, SenderWire
from kvtransfer.link.settings import MAX_LINKS, LinkSettings, WindowSettings
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import CommitPending, Committed, ReceiverEvent, TransferStarted, Withdrawn
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.events import Acknowledged, Failed, SenderEvent
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.device_rigs import DeviceRig
from tests.kvtransfer.support.device_taps import Taps
from tests.kvtransfer.support.owned_blocks import NewArray
from tests.kvtransfer.support.wrapped import WrappedConnector

FINGERPRINT = b"f" * 32
SECRET = b"s" * 32


def identity(name: str, incarnation: int = 1) -> WorkerIdentity:
    return WorkerIdentity(
        name=name, incarnation=bytes([incarnation]) * 16, rank=0, rank_count=1, started_ns=incarnation
    )


class FakeClock:
    """Virtual time, for the deadlines of a transport without clocks of its own."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Store:
    """Blocks in plain memory, both a source and a sink, that counts pins and catches foreign writes."""

    def __init__(
        self, block_bytes: Sequence[int], blocks: int, seed: int, array: NewArray = np.empty
    ) -> None:
        rng = np.random.default_rng(seed)
        self.groups = [array((blocks, size), np.uint8) for size in block_bytes]
        for group in self.groups:
            group[:] = rng.integers(0, 256, group.shape, dtype=np.uint8)
        self.pins: dict[tuple[int, int], int] = {}
        self.places: dict[int, Sequence[Sequence[int]]] = {}
        self.scattered: list[tuple[int, int, int, int]] = []

    def pin(self, group: int, block: int) -> None:
        self.pins[group, block] = self.pins.get((group, block), 0) + 1

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        assert self.pins.get((group, block), 0) > 0, "read of a block that is not pinned"
        return self.groups[group][block, offset : offset + length].data

    def unpin(self, group: int, block: int) -> None:
        self.pins[group, block] -= 1
        assert self.pins[group, block] >= 0
        if not self.pins[group, block]:
            del self.pins[group, block]

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        assert transfer_id in self.places, "bytes of a transfer that was given up"
        assert (transfer_id, group, ordinal, offset) not in self.scattered, "the same bytes twice"
        self.scattered.append((transfer_id, group, ordinal, offset))
        block = self.places[transfer_id][group][ordinal]
        self.groups[group][block, offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def place(self, transfer_id: int, group: int, ordinal: int) -> int:
        """Returns the place at which a device will write a piece."""
        assert transfer_id in self.places, "a place of a transfer that was given up"
        self.scattered.append((transfer_id, group, ordinal, -1))
        return self.places[transfer_id][group][ordinal]


@dataclass
class Shape:
    """Properties of a pair that tests vary."""

    block_bytes: tuple[int, ...] = (4096,)
    piece_bytes: int = 4096
    window_pieces: int = 8
    blocks: int = 64
    # Timeout of opening a link, and of its peer: ample, since hardly any test waits until it has passed.
    timeout_s: float = 3.0


# Several cache groups, of which only one is cut into whole pieces.
ODD = Shape(block_bytes=(10_000, 333, 4096), piece_bytes=4096, window_pieces=6)


@dataclass
class Peers:
    """A receiver and a sender; `step` polls both once."""

    shape: Shape
    receiver: Receiver
    sender: Sender
    endpoints: tuple[Endpoint, ...]
    source: Store
    sink: Store
    advance: Callable[[], None]
    signer: TicketSigner = field(default_factory=lambda: TicketSigner(SECRET))
    received: list[ReceiverEvent] = field(default_factory=list)
    sent: list[SenderEvent] = field(default_factory=list)
    answers: bool = True
    pieces_a_poll: int = 4
    # Whether devices move the blocks, some time after they are enqueued.
    on_device: bool = False
    # The sender's ends of the links that were opened.
    wires: list[SenderWire] = field(default_factory=list)

    def ticket(
        self, transfer_id: int, counts: Sequence[int], held: Sequence[int] = (), **changes: object
    ) -> tuple[Ticket, TicketBody]:
        body = TicketBody(
            attempt=Attempt(request_id=transfer_id.to_bytes(16, "little"), number=1),
            issuer=identity("receiver"),
            endpoints=[endpoint.message() for endpoint in self.endpoints],
            transfer_id=transfer_id,
            block_counts=list(counts),
            resident_counts=list(held),
            token_count=1,
            fingerprint=FINGERPRINT,
        )
        for name, value in changes.items():
            if isinstance(value, WorkerIdentity):
                body.issuer.CopyFrom(value)
            elif name == "endpoints":
                body.ClearField("endpoints")
                body.endpoints.extend(cast(Sequence[Message], value))
            else:
                setattr(body, name, value)
        return self.signer.sign(body), body

    def expect(self, transfer_id: int, places: Sequence[Sequence[int]], held: Sequence[int] = ()) -> None:
        self.sink.places[transfer_id] = places
        self.receiver.transfers.expect(transfer_id, [len(blocks) for blocks in places], held)

    @property
    def address(self) -> str:
        """The address of the receiver's only endpoint."""
        (endpoint,) = self.endpoints
        return endpoint.address

    def forget(self, transfer_id: int) -> None:
        self.receiver.transfers.forget(transfer_id)
        self.sink.places.pop(transfer_id, None)

    def begin(self, transfer_id: int, counts: Sequence[int], held: Sequence[int] = ()) -> Transfer:
        return self.sender.begin(*self.ticket(transfer_id, counts, held))

    def push(self, transfer: Transfer, group: int, ordinal: int, block: int) -> None:
        self.source.pin(group, block)
        transfer.push(group, ordinal, [block])

    def push_all(self, transfer: Transfer, blocks: Sequence[Sequence[int]]) -> None:
        for group, members in enumerate(blocks):
            for block in members:
                self.source.pin(group, block)
            transfer.push(group, 0, members)

    def record(self, transfer: Transfer) -> CommitRecord:
        return CommitRecord(
            attempt=transfer.body.attempt, token_ids=[1, 2, 3], prompt_length=3, first_token_id=7
        )

    def send(
        self, transfer_id: int, blocks: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
    ) -> Transfer:
        """One whole transfer, begun, pushed and committed."""
        self.expect(transfer_id, places)
        transfer = self.begin(transfer_id, [len(members) for members in blocks])
        self.push_all(transfer, blocks)
        transfer.commit(self.record(transfer))
        return transfer

    def step(self) -> None:
        self.sent += self.sender.poll(self.pieces_a_poll)
        for event in self.receiver.poll(self.pieces_a_poll):
            if not isinstance(event, CommitPending):
                self.received.append(event)
            if isinstance(event, Committed) and self.answers:
                self.receiver.transfers.acknowledge(event.transfer_id)
            if isinstance(event, Withdrawn):
                self.sink.places.pop(event.transfer_id, None)
        self.advance()

    def run_until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not reached; {self.received} {self.sent}"
            self.step()

    def settle(self) -> None:
        """Runs until all credits have returned and both ends are idle."""
        self.run_until(lambda: self.at_rest() is None)

    def at_rest(self) -> str | None:
        """Returns None once the pair is idle, or the first resource that is still in use."""
        if self.source.pins or self.sender.pinned_blocks:
            return f"pins {self.source.pins}"
        for link in self.sender.links:
            if link.free_pieces != link.window_pieces or link.credited_pieces or link.live_transfers:
                return f"sender {link}"
        for link in self.receiver.links:
            if link.credited_pieces != link.window_pieces or link.quarantined_pieces or link.live_transfers:
                return f"receiver {link}"
        return None

    def check_ledger(self) -> None:
        """Everything has returned, and bytes shipped = blocks × block size."""
        self.settle()
        counters = self.sender.counters
        sizes = self.shape.block_bytes
        shipped = sum(n * size for n, size in zip(counters.blocks_shipped, sizes, strict=True))
        assert counters.bytes_shipped == shipped

    def acknowledged(self) -> list[int]:
        return [event.transfer.transfer_id for event in self.sent if isinstance(event, Acknowledged)]

    def failures(self) -> dict[int, BatonError]:
        return {event.transfer.transfer_id: event.error for event in self.sent if isinstance(event, Failed)}

    def withdrawn(self) -> dict[int, Withdrawn]:
        return {event.transfer_id: event for event in self.received if isinstance(event, Withdrawn)}

    def arrived(self) -> list[int]:
        return [event.transfer_id for event in self.received if isinstance(event, TransferStarted)]

    def equal(self, blocks: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> bool:
        """True if the receiver's blocks hold what the sender's do."""
        return all(
            np.array_equal(self.source.groups[g][list(blocks[g])], self.sink.groups[g][list(places[g])])
            for g in range(len(blocks))
        )

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        assert not self.source.pins


def make_receiver(
    shape: Shape, sink: Store, wake: Callable[[], None], clock: Callable[[], float], incarnation: int = 1,
    fingerprint: bytes = FINGERPRINT, device: DeviceSink | None = None, max_links: int = MAX_LINKS,
) -> Receiver:  # fmt: skip
    return Receiver(
        settings=_settings(shape, identity("receiver", incarnation), fingerprint),
        window=WindowSettings(shape.piece_bytes, shape.window_pieces, max_links),
        signer=TicketSigner(SECRET),
        sink=sink,
        wake=wake,
        clock=clock,
        device=device,
    )


def make_sender(
    shape: Shape, source: Store, wake: Callable[[], None], clock: Callable[[], float],
    connectors: Sequence[Connector], fingerprint: bytes = FINGERPRINT, incarnation: int = 1,
    own: WorkerIdentity | None = None,
) -> Sender:  # fmt: skip
    return Sender(
        settings=_settings(shape, own or identity("sender", incarnation), fingerprint),
        source=source,
        wake=wake,
        clock=clock,
        connectors=connectors,
    )


def _settings(shape: Shape, own: WorkerIdentity, fingerprint: bytes) -> LinkSettings:
    return LinkSettings(own, fingerprint, shape.block_bytes, shape.timeout_s)


def recording(connectors: Sequence[Connector], wires: list[SenderWire]) -> list[WrappedConnector]:
    """The connectors, which add each link's wire to `wires`."""

    def record(wire: SenderWire) -> SenderWire:
        wires.append(wire)
        return wire

    return [WrappedConnector(one, record) for one in connectors]


def make_peers(
    shape: Shape,
    *,
    listener: Listener | None = None,
    transport: str = "grpc",
    connectors: Sequence[Connector] = (),
    clock: Callable[[], float] = time.monotonic,
    woken: threading.Event | None = None,
    fingerprint: bytes = FINGERPRINT,
    sender_identity: WorkerIdentity | None = None,
    max_links: int = MAX_LINKS,
    rig: DeviceRig | None = None,
    tap: Callable[[Taps, Connector], Connector] = lambda taps, plain: plain,
    connect: Callable[[Callable[[], None], DeviceBlocks], Connector] = IpcConnector,
    ways: Callable[[Callable[[], None], DeviceBlocks], Sequence[Connector]] | None = None,
    nccl: NcclEndpoint | None = None,
    auth: LinkAuth | None = None,
) -> Peers:
    """Over the transport named, or over the listener and connectors given; or between a rig's devices, over
    ipc or what `connect` makes, where `tap` may put wires of bytes in between, or over all that `ways`
    has."""
    array = np.empty if rig is None else rig.array
    source = Store(shape.block_bytes, shape.blocks, 1, array)
    sink = Store(shape.block_bytes, shape.blocks, 2, array)
    event = woken if woken is not None else threading.Event()
    device = None
    if rig is not None:
        device = DeviceSink(
            DeviceBlocks(rig.receiver, [rig.tensor(group, rig.receiver) for group in sink.groups]),
            sink.place, window_pieces=shape.window_pieces, piece_bytes=shape.piece_bytes,
        )  # fmt: skip
        taps = Taps(source.groups, shape.window_pieces, shape.piece_bytes, rig)
        connectors = ways(event.set, taps.blocks) if ways else [tap(taps, connect(event.set, taps.blocks))]
    receiver = make_receiver(shape, sink, event.set, clock, device=device, max_links=max_links)
    if listener is None:
        endpoints = receiver.listen(ListenConfig("127.0.0.1", transport=transport, nccl=nccl, auth=auth))
    else:
        receiver.attach(listener)
        endpoints = (listener.endpoint,)
    if not connectors:
        connectors = make_connectors(transport, event.set, auth=auth)
    wires: list[SenderWire] = []
    sender = make_sender(
        shape, source, event.set, clock, recording(connectors, wires), fingerprint, own=sender_identity
    )

    def advance() -> None:
        event.wait(0.01 if rig is None else rig.advance())
        event.clear()

    return Peers(
        shape, receiver, sender, endpoints, source, sink, advance, on_device=rig is not None, wires=wires
    )
