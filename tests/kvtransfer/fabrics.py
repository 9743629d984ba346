"""What carries the adversary's transfers: a transport, the way to its receiver, and its time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Protocol

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.byte_ring import RING_BYTES
from kvtransfer.frames import Commit, Piece, Quiet, ReceiverFrame, Withdraw
from kvtransfer.grpc_connector import GrpcConnector
from kvtransfer.ipc_connector import IpcConnector, IpcSenderWire
from kvtransfer.receiver import Receiver
from kvtransfer.transport import Connector, SenderWire
from tests.kvtransfer.byte_proxy import ByteProxy
from tests.kvtransfer.memory_transport import MemoryTransport
from tests.kvtransfer.peers import FakeClock


class Fabric(Protocol):
    """One receiver at a time can be reached."""

    woken: threading.Event

    @property
    def connector(self) -> Connector: ...

    def clock(self) -> float: ...

    def attach(self, receiver: Receiver) -> str:
        """Makes this receiver the one that is reached; the address for its tickets."""

    def rest(self, idle: bool) -> None:
        """Between two steps; `idle` where the last one changed nothing."""

    def close(self) -> None: ...


class _Latest:
    """Opens links to the memory transport of the receiver that was attached last."""

    transport = "memory"

    def __init__(self) -> None:
        self.target: MemoryTransport | None = None

    def takes(self, address: str) -> bool:
        return address == MemoryTransport.address

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        if self.target is None:
            raise BatonError(ErrorKind.UNAVAILABLE, "nobody listens")
        return self.target.open(address, request, timeout_s)


class MemoryFabric:
    """Virtual time, which runs where nothing else does."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.connector = _Latest()
        self._clock = FakeClock()

    def clock(self) -> float:
        return self._clock.now

    def attach(self, receiver: Receiver) -> str:
        self.connector.target = MemoryTransport(self.woken.set)
        receiver.attach(self.connector.target)
        return MemoryTransport.address

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.001)
            self.woken.clear()
            self._clock.now += 0.01

    def close(self) -> None:
        """Nothing runs but the loop."""


class GrpcFabric:
    """Real time, real sockets, and a proxy between the ends that wrongs their bytes."""

    def __init__(self, proxy: ByteProxy) -> None:
        self.woken = threading.Event()
        self.connector = GrpcConnector(self.woken.set)
        self._proxy = proxy

    def clock(self) -> float:
        return time.monotonic()

    def attach(self, receiver: Receiver) -> str:
        address = receiver.listen("127.0.0.1")
        self._proxy.target_port = int(address.rsplit(":", 1)[1])
        return f"127.0.0.1:{self._proxy.port}"

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.005)
        self.woken.clear()

    def close(self) -> None:
        self._proxy.close()


class _WrongedWire:
    """A link whose memory is overwritten, or whose socket is cut, at a message that was drawn beforehand."""

    gathers = False

    def __init__(self, wire: IpcSenderWire, fabric: IpcFabric) -> None:
        self._wire = wire
        self._fabric = fabric
        self._dice = fabric.dice
        self._kind = self._dice.choices(list(fabric.weights), list(fabric.weights.values()))[0]
        self._left = int(2 ** self._dice.uniform(0, 7))

    def put(self, piece: Piece, payload: memoryview) -> None:
        self._wire.put(piece, payload)
        self._wrong(piece)

    def tell(self, frame: Commit | Withdraw | Quiet) -> None:
        self._wire.tell(frame)
        self._wrong(None)

    def hear(self) -> ReceiverFrame | None:
        return self._wire.hear()

    def broken(self) -> BatonError | None:
        return self._wire.broken()

    def close(self) -> None:
        self._wire.close()

    def _wrong(self, piece: Piece | None) -> None:
        self._left -= 1
        if self._left != 0 or self._kind == "none" or self._wire.broken() is not None:
            return
        assert self._wire._control is not None
        self._fabric.struck[self._kind] += 1
        match self._kind:
            case "cut":
                self._wire.close()  # in the middle of everything, its word the last
            case "window" if piece is not None and piece.staging < self._wire._pieces:
                at = piece.staging * self._wire._piece_bytes + self._dice.randrange(piece.length)
                self._wire._memory.window[at] ^= 1 << self._dice.randrange(8)
            case _:  # anywhere in the rings: counters, records heard long ago, records not heard yet
                self._wire._memory.shared.bytes[self._dice.randrange(2 * RING_BYTES)] ^= 0x40


class IpcFabric:
    """Real time, real sockets and shared memory, which is wronged under both ends' hands."""

    transport = "ipc"
    weights = {"none": 2, "cut": 2, "window": 3, "rings": 3}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        self.woken = threading.Event()
        self.dice = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self._inner = IpcConnector(self.woken.set)
        self.connector = self

    def takes(self, address: str) -> bool:
        return self._inner.takes(address)

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        response, wire = self._inner.open(address, request, timeout_s)
        return response, _WrongedWire(wire, self)

    def clock(self) -> float:
        return time.monotonic()

    def attach(self, receiver: Receiver) -> str:
        return receiver.listen("127.0.0.1", transport="ipc")

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.005)
        self.woken.clear()

    def close(self) -> None:
        """Nothing runs but what the ends have."""
