"""The nccl transport for tests: over the double of NCCL between fake devices, or NCCL itself between
GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.device.nccl.nccl_channel import NcclChannel
from baton.device.streams.link_device import LinkDevice
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.interfaces import Connector, Listener
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.transports.nccl.connector import NcclConnector
from kvtransfer.transports.nccl.endpoint import Channels, NcclEndpoint
from kvtransfer.transports.nccl.listener import NcclListener
from tests.device.nccl.nccl_double import NcclDouble
from tests.kvtransfer.support.device_rigs import DeviceRig, FakeRig

# NCCL itself takes as long, with the rest of what a process does at first.
CONNECT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 10.0


class WatchedChannels:
    """Channels for `NcclEndpoint`, with a list of those that it was given; tests set the double's faults."""

    def __init__(self, device: LinkDevice) -> None:
        self.double = NcclDouble()
        self._channels: Channels = self.double
        if device.tensors_on.type == "cuda":
            from baton.device.nccl.cuda_nccl import CudaNccl

            self._channels = CudaNccl(device.tensors_on)
        self.channels: list[NcclChannel] = []

    def unique_id(self) -> bytes:
        return self._channels.unique_id()

    def channel(self, unique_id: bytes, rank: int, wake: Callable[[], None]) -> NcclChannel:
        self.channels.append(self._channels.channel(unique_id, rank, wake))
        return self.channels[-1]


class WatchedEndpoint(NcclEndpoint):
    """And the staging that links were given."""

    def __init__(self, device: LinkDevice) -> None:
        self.watched = WatchedChannels(device)
        super().__init__(device, self.watched, CONNECT_TIMEOUT_S)
        self.stagings: list[PieceMemory] = []

    @property
    def channels(self) -> list[NcclChannel]:
        return self.watched.channels

    @property
    def aborting(self) -> int:
        """The number of aborted channels that have not terminated."""
        return sum(not channel.terminated for channel in self._aborting)

    @property
    def double(self) -> NcclDouble:
        return self.watched.double

    def staging(self, pieces: int, piece_bytes: int) -> PieceMemory:
        self.stagings.append(super().staging(pieces, piece_bytes))
        return self.stagings[-1]


class NcclTransport:
    """Both ends' links, a listener and connectors."""

    def __init__(
        self, wake: Callable[[], None], rig: DeviceRig | None = None, peer_timeout_s: float = 1.0
    ) -> None:
        rig = rig if rig is not None else FakeRig(None)
        self.receiving, self.sending = WatchedEndpoint(rig.receiver), WatchedEndpoint(rig.sender)
        self._wake = wake
        self._timeout = peer_timeout_s

    def connect(self, wake: Callable[[], None], blocks: DeviceBlocks) -> NcclConnector:
        return NcclConnector(wake, self.sending, blocks)

    def listener(self) -> NcclListener:
        settings = ListenerSettings(self._wake, self._timeout, 8)
        return NcclListener("127.0.0.1", 0, settings, self.receiving)

    def await_aborts(self) -> None:
        """Waits until NCCL itself has freed what closed links had. Freeing waits for all work on the device,
        and launches wait for it: a receive of the next test would wait for the send that the same loop has
        yet to launch."""
        if self.sending.device.tensors_on.type != "cuda":
            return
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self.sending.aborting + self.receiving.aborting:
            assert time.monotonic() < deadline, "NCCL did not end its channels in time"
            time.sleep(0.01)


def nccl_connector(
    wake: Callable[[], None], rig: DeviceRig | None, blocks: DeviceBlocks | None, timeout_s: float
) -> Connector:
    """The connector of an end in a process of its own."""
    assert blocks is not None, "links by NCCL are between devices"
    return NcclTransport(wake, rig, timeout_s).connect(wake, blocks)


def nccl_listener(wake: Callable[[], None], rig: DeviceRig | None, timeout_s: float) -> Listener:
    """A listener with the same doubles as `nccl_connector`."""
    return NcclTransport(wake, rig, timeout_s).listener()
