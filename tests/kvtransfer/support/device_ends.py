"""Two ends of links between fake devices."""

from __future__ import annotations

import threading
import time

from baton.device.streams.link_device import LinkDevice
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.link.interfaces import SenderWire
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.device_rigs import FakeRig
from tests.kvtransfer.support.fake_device import FakeDevice, FakeStream
from tests.kvtransfer.support.peers import Peers, Shape, Store, make_receiver, make_sender, recording

SHAPE = Shape(block_bytes=(4096, 512), piece_bytes=4096, window_pieces=4)


class Ends:
    """Two ends with the setting `auto`, each with a device or without; nothing in between."""

    def __init__(self) -> None:
        self.rig = FakeRig(5)
        self.made: list[Peers] = []

    def __call__(self, *, sender: bool = True, receiver: bool = True, transport: str = "auto") -> Peers:
        woken = threading.Event()
        source, sink = (Store(SHAPE.block_bytes, SHAPE.blocks, seed) for seed in (1, 2))
        ours = [self.rig.tensor(group, self.rig.sender) for group in source.groups]
        theirs = [self.rig.tensor(group, self.rig.receiver) for group in sink.groups]
        device = DeviceSink(
            DeviceBlocks(self.rig.receiver, theirs), sink.place,
            window_pieces=SHAPE.window_pieces, piece_bytes=SHAPE.piece_bytes,
        )  # fmt: skip
        receiving = make_receiver(SHAPE, sink, woken.set, self._clock, device=device if receiver else None)
        endpoints = receiving.listen(ListenConfig("127.0.0.1", transport=transport))
        blocks = DeviceBlocks(self.rig.sender, ours) if sender else None
        wires: list[SenderWire] = []
        connectors = recording(make_connectors("auto", woken.set, blocks), wires)
        sending = make_sender(SHAPE, source, woken.set, self._clock, connectors)

        def advance() -> None:
            woken.wait(self.rig.advance())
            woken.clear()

        self.made.append(
            Peers(SHAPE, receiving, sending, endpoints, source, sink, advance, on_device=True, wires=wires)
        )
        return self.made[-1]

    @staticmethod
    def _clock() -> float:
        return time.monotonic()


def device_wire(peers: Peers) -> IpcDeviceSenderWire:
    """The sender's end of the link that was opened last."""
    wire = peers.wires[-1]
    assert isinstance(wire, IpcDeviceSenderWire)
    return wire


def streams_of(device: LinkDevice) -> list[FakeStream]:
    """The streams that a fake device has given."""
    assert isinstance(device, FakeDevice)
    return device.streams


def windows(ends: Ends) -> list[bool]:
    """The receiver's windows: whether each has been given back to its device."""
    assert isinstance(ends.rig.receiver, FakeDevice)
    return [memory.freed for memory in ends.rig.receiver.allocated]


def sent(peers: Peers, transfer: int) -> str:
    """A transfer is acknowledged, and what it brought is right; over which transport."""
    blocks, places = [[1, 2, 3], [4, 5]], [[9, 8, 7], [0, 1]]
    peers.send(transfer, blocks, places)
    peers.run_until(lambda: transfer in peers.acknowledged())
    assert peers.equal(blocks, places)
    peers.check_ledger()
    (link,) = peers.sender.links
    return link.transport
