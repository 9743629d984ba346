"""Carriers of the adversary's transfers: a transport, the way to its receiver, and its time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.link.interfaces import Connector, SenderWire
from kvtransfer.protocol.addresses import GRPC, Endpoint
from kvtransfer.protocol.frames import Piece
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.transports.grpc.connector import GrpcConnector
from kvtransfer.transports.ipc.byte_ring import RING_BYTES
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from kvtransfer.transports.ipc.sender_wire import IpcSenderWire
from kvtransfer.transports.listen_config import ListenConfig
from tests.kvtransfer.adversary.byte_proxy import ByteProxy
from tests.kvtransfer.support.device_rigs import DeviceRig
from tests.kvtransfer.support.device_taps import Taps
from tests.kvtransfer.support.memory_transport import MemoryTransport
from tests.kvtransfer.support.owned_blocks import Sink, Source
from tests.kvtransfer.support.peers import FakeClock
from tests.kvtransfer.support.wrapped import CorruptedWire

# Piece size and window of every link of the adversary.
PIECE_BYTES = 1024
WINDOW = 10


class Fabric(Protocol):
    """One receiver at a time can be reached."""

    woken: threading.Event
    # Whose devices the blocks lie on, and the receiver's; None on the host.
    rig: DeviceRig | None
    device: DeviceSink | None

    def take(self, source: Source, sink: Sink) -> None:
        """The ends' blocks, before anything else is asked."""

    def tap(self, tampering: Callable[[Connector], Connector]) -> Connector:
        """The connector that senders use: the transport's behind that of a test."""

    def clock(self) -> float: ...

    def attach(self, receiver: Receiver) -> tuple[Endpoint, ...]:
        """Makes this receiver the one that is reached; the endpoints for its tickets."""

    def rest(self, idle: bool) -> None:
        """Between two steps; `idle` where the last one changed nothing."""

    def close(self) -> None: ...


class _OnHost:
    """Blocks lie in plain memory."""

    rig: DeviceRig | None = None
    connector: Connector
    device: DeviceSink | None = None

    def take(self, source: Source, sink: Sink) -> None:
        """Does nothing: the ends' blocks are in plain memory."""

    def tap(self, tampering: Callable[[Connector], Connector]) -> Connector:
        return tampering(self.connector)


class _Latest:
    """Opens links to the memory transport of the receiver that was attached last."""

    transport = "memory"

    def __init__(self) -> None:
        self.target: MemoryTransport | None = None

    def reaches(self, endpoint: Endpoint) -> bool:
        return endpoint == MemoryTransport.endpoint

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        if self.target is None:
            raise BatonError(ErrorKind.UNAVAILABLE, "no listener")
        return self.target.open(endpoint, request, timeout_s)


class MemoryFabric(_OnHost):
    """Virtual time, which runs where nothing else does."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.connector = self._latest = _Latest()
        self._clock = FakeClock()

    def clock(self) -> float:
        return self._clock.now

    def attach(self, receiver: Receiver) -> tuple[Endpoint, ...]:
        memory = MemoryTransport(self.woken.set)
        self._latest.target = memory
        receiver.attach(memory)
        return (MemoryTransport.endpoint,)

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.001)
            self.woken.clear()
            self._clock.now += 0.01

    def close(self) -> None:
        """Does nothing: nothing runs except the loop."""


class GrpcFabric(_OnHost):
    """Real time, real sockets, and a proxy between the ends that corrupts their bytes."""

    def __init__(self, proxy: ByteProxy) -> None:
        self.woken = threading.Event()
        self.connector = GrpcConnector(self.woken.set)
        self._proxy = proxy

    def clock(self) -> float:
        return time.monotonic()

    def attach(self, receiver: Receiver) -> tuple[Endpoint, ...]:
        (endpoint,) = receiver.listen(ListenConfig("127.0.0.1"))
        self._proxy.target_port = int(endpoint.address.rsplit(":", 1)[1])
        return (Endpoint(GRPC, f"127.0.0.1:{self._proxy.port}"),)

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.005)
        self.woken.clear()

    def close(self) -> None:
        self._proxy.close()


class _CorruptedWire(CorruptedWire):
    """A wire whose memory is overwritten, or whose socket is cut."""

    def __init__(
        self, wire: SenderWire, link: IpcSenderWire, response: OpenLinkResponse, fabric: IpcFabric
    ) -> None:
        """`link`: what `wire` is, or what lies under it; `response`: the answer by which it was opened."""
        super().__init__(wire, fabric.dice, fabric.weights, fabric.struck)
        self._link = link
        self._response = response
        self._fabric = fabric

    def _strike(self, kind: str, piece: Piece | None) -> None:
        match kind:
            case "cut":
                self._wire.close()  # in the middle of everything, its word the last
            case "window" if piece is not None and piece.staging < self._response.window_pieces:
                at = piece.staging * self._response.piece_bytes + self._dice.randrange(piece.length)
                self._flip(at, self._dice.randrange(8))
            case _:  # anywhere in the rings: counters, records read long ago, records not read yet
                self._link.memory.shared.bytes[self._dice.randrange(2 * RING_BYTES)] ^= 0x40

    def _flip(self, at: int, bit: int) -> None:
        if isinstance(self._link, IpcDeviceSenderWire):
            assert self._fabric.rig is not None
            self._fabric.rig.flip(self._link.window.address + at, bit)
        else:
            self._link.memory.window[at] ^= 1 << bit


class IpcFabric(_OnHost):
    """Real time, real sockets and shared memory, which is corrupted while both ends use it."""

    transport = "ipc"
    weights = {"none": 2, "cut": 2, "window": 3, "rings": 3}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        self.woken = threading.Event()
        self.dice = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self._inner = IpcConnector(self.woken.set)
        self.connector = self

    def reaches(self, endpoint: Endpoint) -> bool:
        return self._inner.reaches(endpoint)

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        response, wire = self._inner.open(endpoint, request, timeout_s)
        return response, _CorruptedWire(wire, wire, response, self)

    def clock(self) -> float:
        return time.monotonic()

    def attach(self, receiver: Receiver) -> tuple[Endpoint, ...]:
        return receiver.listen(ListenConfig("127.0.0.1", transport="ipc"))

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.005)
        self.woken.clear()

    def close(self) -> None:
        """Does nothing: the ends close all that runs."""


class DeviceFabric(IpcFabric):
    """Between a rig's devices: window and rings are corrupted."""

    def __init__(self, seed: int, rig: DeviceRig) -> None:
        super().__init__(seed)
        self.rig = rig

    def take(self, source: Source, sink: Sink) -> None:
        assert self.rig is not None
        self._taps = Taps(source.bytes, WINDOW, PIECE_BYTES, self.rig)
        blocks = DeviceBlocks(self.rig.receiver, [self.rig.tensor(a, self.rig.receiver) for a in sink.bytes])
        self.device = DeviceSink(blocks, sink.place, window_pieces=WINDOW, piece_bytes=PIECE_BYTES)
        self._inner = IpcConnector(self.woken.set, self._taps.blocks)

    def tap(self, tampering: Callable[[Connector], Connector]) -> Connector:
        return self._taps.top(tampering(self))

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        response, wire = self._inner.open(endpoint, request, timeout_s)
        assert isinstance(wire, IpcDeviceSenderWire)
        return response, _CorruptedWire(self._taps.lower(wire), wire, response, self)

    def rest(self, idle: bool) -> None:
        assert self.rig is not None
        self.rig.advance()
        if idle:
            self.woken.wait(0.001)
        self.woken.clear()


class PlainDeviceFabric(DeviceFabric):
    """A fabric with no fault between the ends, which gather, copy and scatter by themselves."""

    def tap(self, tampering: Callable[[Connector], Connector]) -> Connector:
        return tampering(self)

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        return self._inner.open(endpoint, request, timeout_s)
