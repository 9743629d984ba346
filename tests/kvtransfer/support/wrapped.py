"""Wires and connectors that wrap others and change some frames."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping

from baton.base.errors import BatonError
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.interfaces import Connector, SenderWire
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import Piece, ReceiverFrame, SenderControl


class WrappedWire:
    """All but the pieces passes as it is."""

    def __init__(self, wire: SenderWire) -> None:
        self._wire = wire

    @property
    def shares_clock(self) -> bool:
        return self._wire.shares_clock

    def send(self, frame: SenderControl) -> None:
        self._wire.send(frame)

    def receive(self) -> ReceiverFrame | None:
        return self._wire.receive()

    def failure(self) -> BatonError | None:
        return self._wire.failure()

    def close(self) -> None:
        self._wire.close()


def draw_kind(dice: random.Random, weights: Mapping[str, int], struck: Counter[str]) -> str:
    """Draws a kind of fault by weight, "none" among them; as long as a kind has never struck, one of those.

    How many links a run opens depends on time, so draws by weight alone would miss a kind now and then."""
    missing = {kind: weight for kind, weight in weights.items() if kind != "none" and not struck[kind]}
    drawn_from = missing or weights
    return dice.choices(list(drawn_from), list(drawn_from.values()))[0]


class CorruptedWire(WrappedWire, ABC):
    """A link with one fault, whose kind and message were drawn in advance."""

    on_device = False

    def __init__(
        self, wire: SenderWire, dice: random.Random, weights: Mapping[str, int], struck: Counter[str]
    ) -> None:
        """`weights` of the ways, of which "none" is one; `struck` counts what was done."""
        super().__init__(wire)
        self._dice = dice
        self._struck = struck
        self._kind = draw_kind(dice, weights, struck)
        self._left = int(2 ** dice.uniform(0, 7))

    def put(self, piece: Piece, payload: memoryview) -> None:
        self._wire.put(piece, payload)
        self._passed(piece)

    def send(self, frame: SenderControl) -> None:
        self._wire.send(frame)
        self._passed(None)

    def _passed(self, piece: Piece | None) -> None:
        self._left -= 1
        if self._left == 0 and self._kind != "none" and self._wire.failure() is None:
            self._struck[self._kind] += 1
            self._strike(self._kind, piece)

    @abstractmethod
    def _strike(self, kind: str, piece: Piece | None) -> None:
        """Applies the fault; `piece` has just been put, or a frame sent."""


class WrappedConnector:
    """`dress` makes of each link's wire what stands in its place."""

    def __init__(self, inner: Connector, dress: Callable[[SenderWire], SenderWire]) -> None:
        self.transport = inner.transport
        self._inner = inner
        self._dress = dress

    def reaches(self, endpoint: Endpoint) -> bool:
        return self._inner.reaches(endpoint)

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, SenderWire]:
        response, wire = self._inner.open(endpoint, request, timeout_s)
        return response, self._dress(wire)
