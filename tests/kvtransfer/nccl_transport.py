"""The nccl transport for tests: over the double of NCCL, on the host or a played device, or NCCL itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from baton.device.link_device import LinkDevice
from baton.device.nccl_line import NcclLine
from kvtransfer.device_blocks import DeviceBlocks
from kvtransfer.nccl_connector import NcclConnector
from kvtransfer.nccl_device import DevicePlace, Lines
from kvtransfer.nccl_links import TRANSPORT, NcclLinks, Place
from kvtransfer.nccl_receiver import NcclListener
from kvtransfer.transport import Connector, Listener
from tests.device.nccl_double import NcclDouble
from tests.kvtransfer.device_rigs import DeviceRig

# NCCL itself takes as long, with the rest of what a process does at first.
CONNECT_S = 5.0


class HostPlace:
    """The host's memory."""

    def __init__(self, size: int) -> None:
        self.window: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)

    @property
    def address(self) -> int:
        return int(self.window.ctypes.data)

    def free(self) -> None:
        """With its last user."""

    def write(self, at: int, payload: bytes | memoryview) -> None:
        self.window[at : at + len(payload)] = np.frombuffer(payload, dtype=np.uint8)


class WatchedLibrary:
    """What `NcclLinks` takes, and what it gave; the double's faults are the tests'."""

    def __init__(self, device: LinkDevice | None = None) -> None:
        self.double = NcclDouble()
        self.device = device
        self._lines: Lines = self.double
        if device is not None and device.tensors_on.type == "cuda":
            from baton.device.nccl_on_cuda import CudaNccl

            self._lines = CudaNccl(device.tensors_on)
        self.lines: list[NcclLine] = []
        self.places: list[Place] = []

    def unique_id(self) -> bytes:
        return self._lines.unique_id()

    def line(self, unique_id: bytes, rank: int, wake: Callable[[], None], connect_s: float) -> NcclLine:
        self.lines.append(self._lines.line(unique_id, rank, wake, connect_s))
        return self.lines[-1]

    def place(self, size: int) -> Place:
        place = HostPlace(size) if self.device is None else DevicePlace(self.device.allocate(size))
        self.places.append(place)
        return place


class NcclTransport:
    """Both ends' libraries, a listener and connectors."""

    def __init__(
        self, wake: Callable[[], None], rig: DeviceRig | None = None, peer_timeout_s: float = 1.0
    ) -> None:
        self.receiving = WatchedLibrary(rig.receiver if rig is not None else None)
        self.sending = WatchedLibrary(rig.sender if rig is not None else None)
        self.receiver_links, self.sender_links = (
            NcclLinks(library, CONNECT_S) for library in (self.receiving, self.sending)
        )
        self._wake = wake
        self._timeout = peer_timeout_s
        self.connector = NcclConnector(wake, self.sender_links)

    def connect(self, wake: Callable[[], None], blocks: DeviceBlocks) -> NcclConnector:
        """For blocks on a device."""
        return NcclConnector(wake, self.sender_links, blocks)

    def listener(self) -> NcclListener:
        return NcclListener(
            "127.0.0.1", 0, peer_timeout_s=self._timeout, max_links=8, wake=self._wake,
            links=self.receiver_links,
        )  # fmt: skip


def connector_for(
    transport: str,
    wake: Callable[[], None],
    rig: DeviceRig | None,
    blocks: DeviceBlocks | None,
    timeout_s: float,
) -> Connector | None:
    """Of an end in a process of its own; None where `transport` is another."""
    if transport.partition("-")[0] != TRANSPORT:
        return None
    made = NcclTransport(wake, rig, timeout_s)
    return made.connector if blocks is None else made.connect(wake, blocks)


def listener_for(
    transport: str, wake: Callable[[], None], rig: DeviceRig | None, timeout_s: float
) -> Listener | None:
    """As `connector_for`."""
    if transport.partition("-")[0] != TRANSPORT:
        return None
    return NcclTransport(wake, rig, timeout_s).listener()
