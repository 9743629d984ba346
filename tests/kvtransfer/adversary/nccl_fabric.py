"""Links by NCCL for the adversary, between a rig's devices: one of whose ends is cut, or its memory
overwritten."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.link.interfaces import Connector, SenderWire
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import Piece
from kvtransfer.receiver.receiver import Receiver
from tests.kvtransfer.adversary.fabrics import PIECE_BYTES, WINDOW
from tests.kvtransfer.support.device_rigs import DeviceRig
from tests.kvtransfer.support.device_taps import Taps
from tests.kvtransfer.support.nccl_transport import NcclTransport
from tests.kvtransfer.support.owned_blocks import Sink, Source
from tests.kvtransfer.support.wrapped import CorruptedWire


class _CorruptedChannelWire(CorruptedWire):
    """An end of it is cut or ended, or its memory overwritten."""

    def __init__(self, wire: SenderWire, window_pieces: int, fabric: NcclFabric) -> None:
        super().__init__(wire, fabric.dice, fabric.weights, fabric.struck)
        self._pieces = window_pieces
        # The receiver's end was opened just before the sender's.
        ends = fabric.nccl.sending, fabric.nccl.receiving
        self._channels = [end.channels[-1] for end in ends]
        self._stagings = [end.stagings[-1] for end in ends]

    def _strike(self, kind: str, piece: Piece | None) -> None:
        dice = self._dice
        match kind:
            case "cut":
                self._wire.close()
            case "channel":  # one end's kernels end without notice
                dice.choice(self._channels).abort("corrupted")
            case _ if piece is not None and piece.staging < self._pieces:
                staging = dice.choice(self._stagings)
                at = piece.staging * staging.stride + dice.randrange(staging.head + piece.length)
                staging.memory.tensor[at : at + 1].bitwise_xor_(1 << dice.randrange(8))


class NcclFabric:
    """Real time, real sockets, and NCCL or its double."""

    transport = "nccl"

    def __init__(self, seed: int, rig: DeviceRig) -> None:
        self.weights = {"none": 2, "cut": 2, "channel": 3, "window": 3}
        self.woken = threading.Event()
        self.dice = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.rig: DeviceRig | None = rig
        self.device: DeviceSink | None = None
        self.nccl = NcclTransport(self.woken.set, rig)

    def take(self, source: Source, sink: Sink) -> None:
        rig = self.rig
        assert rig is not None
        self._taps = Taps(source.bytes, WINDOW, PIECE_BYTES, rig)
        blocks = DeviceBlocks(rig.receiver, [rig.tensor(array, rig.receiver) for array in sink.bytes])
        self.device = DeviceSink(blocks, sink.place, window_pieces=WINDOW, piece_bytes=PIECE_BYTES)
        self._inner: Connector = self.nccl.connect(self.woken.set, self._taps.blocks)

    def tap(self, tampering: Callable[[Connector], Connector]) -> Connector:
        return self._taps.top(tampering(self))

    def reaches(self, endpoint: Endpoint) -> bool:
        return self._inner.reaches(endpoint)

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        response, wire = self._inner.open(endpoint, request, timeout_s)
        return response, _CorruptedChannelWire(self._taps.lower(wire), response.window_pieces, self)

    def clock(self) -> float:
        return time.monotonic()

    def attach(self, receiver: Receiver) -> tuple[Endpoint, ...]:
        listener = self.nccl.listener()
        receiver.attach(listener)
        return (listener.endpoint,)

    def rest(self, idle: bool) -> None:
        if idle:
            self.woken.wait(0.001)
        self.woken.clear()

    def close(self) -> None:
        """Does nothing: the ends close all that runs."""
        self.nccl.await_aborts()
