"""One contract, every transport: every test that takes `link_peers` runs on each."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from baton.base.errors import BatonError
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.link.interfaces import Connector, Listener, SenderWire
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import Piece, ReceiverFrame, SenderControl
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.device_ends import Ends
from tests.kvtransfer.support.device_rigs import rig_of
from tests.kvtransfer.support.device_taps import Taps
from tests.kvtransfer.support.memory_transport import MemoryTransport
from tests.kvtransfer.support.nccl_transport import NcclTransport
from tests.kvtransfer.support.peers import FINGERPRINT, Peers, Shape, make_peers

Tamper = Callable[[Piece, bytes], tuple[Piece, bytes] | None]


class TamperedWire:
    """Passes everything on, pieces after what `tamper` makes of them (None: lost)."""

    on_device = False
    shares_clock = False

    def __init__(self, wire: SenderWire, connector: TamperedConnector) -> None:
        self._wire = wire
        self._connector = connector

    def put(self, piece: Piece, payload: memoryview) -> None:
        changed = self._connector.tamper(piece, bytes(payload))
        if changed is not None:
            self._wire.put(changed[0], memoryview(changed[1]))

    def send(self, frame: SenderControl) -> None:
        if not self._connector.mute:
            self._wire.send(frame)

    def receive(self) -> ReceiverFrame | None:
        return None if self._connector.deaf else self._wire.receive()

    def failure(self) -> BatonError | None:
        return self._wire.failure()

    def close(self) -> None:
        self._wire.close()


class TamperedConnector:
    """Wraps a transport's connector; the only way in for faults between the ends."""

    def __init__(self, inner: Connector, transport: str) -> None:
        self.transport = transport
        self.tamper: Tamper = lambda piece, payload: (piece, payload)
        self.mute = False
        self.deaf = False
        self.wires: list[SenderWire] = []
        self.inner = inner

    def reaches(self, endpoint: Endpoint) -> bool:
        return self.inner.reaches(endpoint)

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        response, wire = self.inner.open(endpoint, request, timeout_s)
        self.wires.append(wire)
        return response, TamperedWire(wire, self)


class LinkPeers:
    """Makes peers over one transport and closes them after the test."""

    def __init__(self, name: str) -> None:
        self.transport = name.partition("-")[0]
        self.rig = rig_of(name, at_once=name == "nccl-fake")
        self.woken = threading.Event()
        self.memory = MemoryTransport(self.woken.set)
        self.nccl = NcclTransport(self.woken.set, self.rig)
        self.connector = TamperedConnector(self._plain_connector(), self.transport)
        self._made: list[Peers] = []

    def _plain_connector(self) -> Connector:
        """Between devices, `_tap` puts another in its place."""
        if self.transport == "memory":
            return self.memory
        return make_connectors("auto" if self.rig is not None else self.transport, self.woken.set)[0]

    def _listener(self) -> Listener | None:
        """The listener to be used; None: the receiver starts its own."""
        if self.transport == "nccl":
            return self.nccl.listener()
        return self.memory if self.transport == "memory" else None

    def __call__(
        self,
        shape: Shape | None = None,
        *,
        fingerprint: bytes = FINGERPRINT,
        sender: WorkerIdentity | None = None,
    ) -> Peers:
        shape = shape if shape is not None else Shape()
        if self.rig is not None:  # whole words
            sizes = tuple(-(-size // 4) * 4 for size in shape.block_bytes)
            shape = dataclasses.replace(shape, block_bytes=sizes)
        peers = make_peers(
            shape,
            listener=self._listener(),
            transport=self.transport,
            connectors=[self.connector],
            woken=self.woken,
            fingerprint=fingerprint,
            sender_identity=sender,
            rig=self.rig,
            tap=self._tap,
            connect=self.nccl.connect if self.transport == "nccl" else IpcConnector,
        )
        self._made.append(peers)
        return peers

    def _tap(self, taps: Taps, plain: Connector) -> Connector:
        self.connector.inner = taps.bottom(plain)
        return taps.top(self.connector)

    def close(self) -> None:
        for peers in self._made:
            peers.close()
        self.nccl.await_aborts()


ON_CUDA = pytest.param("ipc-cuda", marks=pytest.mark.gpu)
BETWEEN_GPUS = pytest.param("ipc-peer", marks=pytest.mark.multigpu)
OVER_NCCL = [
    pytest.param("nccl-fake", marks=pytest.mark.slow),
    pytest.param("nccl-peer", marks=pytest.mark.multigpu),
]


@cache
def nccl_has_begun() -> None:
    """A process's first communicator takes NCCL a second or more: not one of a test's that counts them."""
    made = LinkPeers("nccl-peer")
    peers = made(Shape(timeout_s=20.0))
    peers.send(1, [[1]], [[1]])
    peers.run_until(lambda: peers.acknowledged() == [1], seconds=30.0)
    made.close()


@pytest.fixture(params=["memory", "grpc", "ipc", "ipc-fake", ON_CUDA, BETWEEN_GPUS, *OVER_NCCL])
def link_peers(request: pytest.FixtureRequest) -> Iterator[LinkPeers]:
    if request.param == "nccl-peer":
        nccl_has_begun()
    made = LinkPeers(request.param)
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for peers in made.made:
        peers.close()
