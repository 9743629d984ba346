"""Two ends of links between fake devices."""

from __future__ import annotations

import threading
import time

from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.sender.link import SendingLink
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.device_rigs import FakeRig
from tests.kvtransfer.support.fake_device import FakeDevice
from tests.kvtransfer.support.peers import Peers, Shape, Store, make_receiver, make_sender

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
        sending = make_sender(
            SHAPE, source, woken.set, self._clock, make_connectors("auto", woken.set, blocks)
        )

        def advance() -> None:
            woken.wait(self.rig.advance())
            woken.clear()

        self.made.append(Peers(SHAPE, receiving, sending, endpoints, source, sink, advance, on_device=True))
        return self.made[-1]

    @staticmethod
    def _clock() -> float:
        return time.monotonic()


def link_of(peers: Peers) -> SendingLink:
    (link,) = peers.sender._links.values()
    return link


def device_wire(peers: Peers) -> IpcDeviceSenderWire:
    window = link_of(peers)._window
    assert window is not None
    assert isinstance(window.wire, IpcDeviceSenderWire)
    return window.wire


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
    return link_of(peers).transport
