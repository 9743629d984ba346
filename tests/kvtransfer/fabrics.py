"""What carries the adversary's transfers: a transport, the way to its receiver, and its time."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.grpc_connector import GrpcConnector
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
