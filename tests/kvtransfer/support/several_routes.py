"""A receiver with several routes to it, all in memory and on a virtual clock, and its sender's log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.link.interfaces import UnreachableError
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.sender.events import Acknowledged
from kvtransfer.sender.transfer import Transfer
from tests.kvtransfer.support.memory_transport import MemorySenderWire, MemoryTransport
from tests.kvtransfer.support.peers import FakeClock, Shape, make_peers

# Blocks of three pieces each.
SHAPE = Shape(block_bytes=(10,), piece_bytes=4, window_pieces=8)

# How a link is cut, and its sender's error.
BROKEN = BatonError(ErrorKind.UNAVAILABLE, "cut")
LOST = "the link to 'receiver' broke: cut"


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[tuple[str, dict[str, object]]]:
    """Level and fields of each line of this event that a sender has logged."""
    # Asked for each time: Ray, once loaded into the process, adds one to every record.
    always = {*logging.makeLogRecord({}).__dict__, "message", "asctime"}
    return [
        (line.levelname, {name: value for name, value in line.__dict__.items() if name not in always})
        for line in caplog.records
        if line.name == "kvtransfer.sender.sender" and line.getMessage() == event
    ]


class MemoryRoute(MemoryTransport):
    """One of the routes. It can be unreachable, and its answers can be held back."""

    def __init__(self, name: str, woken: threading.Event) -> None:
        super().__init__(woken.set)
        self.transport, self.endpoint = name, Endpoint(name, "1")
        self.unreachable = ""  # why
        self.asked: list[OpenLinkRequest] = []
        self.answering = threading.Event()
        self.answering.set()

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, MemorySenderWire]:
        self.asked.append(request)
        self.answering.wait(5)
        if self.unreachable:
            raise UnreachableError(self.unreachable)
        response, wire = super().open(endpoint, request, timeout_s)
        wire.shares_clock = self.transport == "ipc"
        return response, wire


class SeveralRoutes:
    """One sender, one receiver, and the routes between them, the best first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.clock = FakeClock()
        self.woken = threading.Event()
        self.ways = [MemoryRoute(name, self.woken) for name in names]
        self.peers = make_peers(
            SHAPE, listener=self.ways[0], connectors=self.ways, clock=self.clock, woken=self.woken
        )
        for way in self.ways[1:]:
            self.peers.receiver.attach(way)
        self.peers.endpoints = tuple(way.endpoint for way in self.ways)

    def send(self, transfer: int) -> str:
        """One transfer of one block; the transport that carried it."""
        self.peers.send(transfer, [[transfer]], [[transfer]])
        self.peers.run_until(lambda: transfer in self.peers.acknowledged())
        self.peers.run_until(lambda: not any(link.credited_pieces for link in self.peers.sender.links))
        event = self.peers.sent[-1]
        assert isinstance(event, Acknowledged)
        return event.transport

    def half(self, transfer: int) -> Transfer:
        """One of two blocks, the first of which has arrived."""
        self.peers.expect(transfer, [[transfer, transfer + 1]])
        half = self.peers.begin(transfer, [2])
        self.peers.push(half, 0, 0, transfer)
        self.peers.run_until(lambda: transfer in self.peers.arrived())
        return half

    def cut(self, way: MemoryRoute) -> None:
        """Cuts the link over this route; both ends notice."""
        way.pipes[-1].break_off(BROKEN)
        self.peers.run_until(lambda: way.transport not in self.in_use() + self.received())

    def in_use(self) -> list[str]:
        return [link.transport for link in self.peers.sender.links]

    def received(self) -> list[str]:
        return [link.transport for link in self.peers.receiver.links]

    def later(self, seconds: float) -> None:
        """Time passes; what is tried then has had its answer on return."""
        self.clock.now += seconds
        self.peers.step()
        self.peers.run_until(lambda: not any(one.name == "link-open" for one in threading.enumerate()))
        self.peers.step()

    def counted(self) -> tuple[int, int, int, int]:
        """Links that were opened, fell back, returned, broke."""
        counters = self.peers.sender.counters
        return (
            counters.links_opened,
            counters.link_fallbacks,
            counters.links_returned,
            counters.links_broken,
        )
