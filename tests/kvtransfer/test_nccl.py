"""Links by NCCL, over its double: where bytes go, when a window is fenced, what follows if NCCL hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from baton.device import nccl_line
from baton.device.nccl import Result
from baton.device.nccl_line import Job, Way
from baton.errors import BatonError, ErrorKind
from kvtransfer.events import Acknowledged
from kvtransfer.frames import FrameError, Piece, Quiet, Summed, encode, encode_piece_header
from kvtransfer.grpc_connector import GrpcConnector
from kvtransfer.grpc_listener import GrpcListener
from kvtransfer.nccl_links import GREETING_BYTES, RECEIVER_RANK, SENDER_RANK
from kvtransfer.nccl_receiver import RunInbox
from kvtransfer.staging import Owner, Staging
from kvtransfer.transport import Connector
from tests.kvtransfer.nccl_transport import NcclTransport, WatchedLibrary
from tests.kvtransfer.peers import Peers, Shape, make_peers

SHAPE = Shape(block_bytes=(8192,), window_pieces=8)


class Linked:
    """Peers that have nccl, and grpc as the second way."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.nccl = NcclTransport(self.woken.set)
        connectors: list[Connector] = [self.nccl.connector, GrpcConnector(self.woken.set)]
        listener = self.nccl.listener()
        self.peers = make_peers(SHAPE, listener=listener, connectors=connectors, woken=self.woken)
        second = GrpcListener(
            "127.0.0.1", 0, piece_bytes=4096, peer_timeout_s=1.0, max_links=8, wake=self.woken.set
        )
        self.peers.receiver.attach(second)
        self.peers.address = f"{listener.address} {second.address}"

    def send(self, transfer: int) -> str:
        """Sends one transfer of four blocks; the transport that carried it."""
        blocks = [[4 * transfer + n for n in range(4)]]
        self.peers.send(transfer, blocks, blocks)
        self.peers.run_until(lambda: transfer in self.peers.acknowledged())
        assert self.peers.equal(blocks, blocks)
        event = self.peers.sent[-1]
        assert isinstance(event, Acknowledged)
        return event.transport

    def close(self) -> None:
        for library in (self.nccl.receiving, self.nccl.sending):
            library.double.hangs.clear()
        self.peers.close()
        until(self.peers, lambda: not self.nccl.receiver_links.ending + self.nccl.sender_links.ending)


def until(peers: Peers, holds: object) -> None:
    peers.run_until(holds)  # type: ignore[arg-type]


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    yield made
    made.close()


def test_bytes_go_from_staging_to_staging(linked: Linked) -> None:
    """The same index on both sides; over the stream, nothing but their names."""
    assert linked.send(1) == "nccl"
    (ours,), (theirs,) = linked.nccl.sending.places, linked.nccl.receiving.places
    moved = linked.peers.receiver.counters.bytes_received
    assert moved == 4 * 8192
    assert np.array_equal(ours.window[:moved], theirs.window[:moved])
    assert ours.window[:moved].any()
    linked.peers.check_ledger()
    assert linked.peers.sender.counters.link_fallbacks == 0


def test_a_receive_without_a_sender_is_ended_by_ourselves(linked: Linked) -> None:
    """The sender's device stops within a run: its window is fenced by our own abort, and by nothing less."""
    assert linked.send(1) == "nccl"
    peers, library = linked.peers, linked.nccl.receiving
    line, place = library.lines[0], library.places[0]
    ended = threading.Event()
    line.add(Job(Way.IN, place.address, 4096, ended=ended.set))  # what nobody sends
    library.double.hangs.set()
    linked.nccl.sending.lines[0].abort("killed")
    peers.run_until(lambda: peers.receiver.counters.links_broken == 1)
    for _ in range(20):
        peers.receiver.poll(10)
        time.sleep(0.005)
    (audit,) = peers.receiver.links
    assert audit.quarantined_pieces == audit.window_pieces
    assert not line.over
    library.double.hangs.clear()
    peers.run_until(lambda: peers.receiver.links == [])
    assert peers.receiver.counters.links_fenced == 1
    assert line.over
    assert not ended.is_set()


def test_a_link_that_broke_is_followed_by_one_over_grpc(linked: Linked) -> None:
    assert linked.send(1) == "nccl"
    linked.nccl.sending.double.fails = Result.REMOTE_ERROR
    linked.nccl.sending.lines[0].add(Job(Way.OUT, linked.nccl.sending.places[0].address, 64))
    linked.peers.run_until(lambda: not linked.peers.sender.links)
    assert linked.send(2) == "grpc"
    assert linked.peers.sender.counters.link_fallbacks == 1


def test_ends_that_do_not_meet_leave_grpc(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer fails of it."""
    monkeypatch.setattr(linked.nccl.receiving.double, "fails", Result.SYSTEM_ERROR)
    assert linked.send(1) == "grpc"
    assert linked.peers.sender.counters.link_fallbacks == 1
    assert not linked.peers.failures()


def test_where_nccl_has_hung_no_link_is_made_by_it(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """For good, though the abort comes back at last."""
    monkeypatch.setattr(nccl_line, "OVERDUE_S", 0.1)
    assert linked.send(1) == "nccl"
    links, double = linked.nccl.sender_links, linked.nccl.sending.double
    double.hangs.set()
    linked.peers.sender._break(
        next(iter(linked.peers.sender._links)), BatonError(ErrorKind.UNAVAILABLE, "cut")
    )
    assert not links.hung
    linked.peers.run_until(lambda: links.hung)
    linked.peers.sender._fallen.clear()  # it would try nccl first
    assert linked.send(2) == "grpc"
    assert links.ending == 1
    double.hangs.clear()
    linked.peers.run_until(lambda: links.ending == 0)
    assert links.hung
    with pytest.raises(BatonError, match="did not end a link"):
        links.line(links.unique_id(), SENDER_RANK, lambda: None)


def test_a_receiver_whose_nccl_has_hung_is_reached_another_way(
    linked: Linked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once: nobody has judged the sender's request, and no transfer fails of it."""
    monkeypatch.setattr(linked.nccl.receiver_links, "_hung", True)
    assert linked.send(1) == "grpc"
    assert not linked.peers.failures()
    assert linked.peers.sender.counters.link_fallbacks == 1
    assert linked.peers.receiver.counters.links_refused == 1


def _run_inbox(*, between_devices: bool = False) -> tuple[RunInbox, Staging, WatchedLibrary]:
    library = WatchedLibrary()
    place = library.place(8 * 4096)
    line = library.line(library.unique_id(), RECEIVER_RANK, lambda: None, 1.0)
    staging = Staging(8, 4096, place.window)
    inbox = RunInbox(staging, line, place.address, lambda: None, between_devices=between_devices)
    inbox.greeted.set()
    return inbox, staging, library


def _names(*indices: int, length: int = 4096) -> bytes:
    return b"".join(encode_piece_header(Piece(1, 0, n, 0, length, n, 7)) for n in indices)


@pytest.mark.parametrize(
    "message",
    [_names(1, 3), _names(2, 1), _names(7, 8), _names(9), _names(0, 0), _names(1, 2, length=4097),
     _names(0, 1, length=100), _names(1, 2) + b"x", _names(1) + encode(Quiet(3))],
    ids=["gap", "back", "beyond", "far", "twice", "too long", "short before the last", "crumbs", "mixed"],
)  # fmt: skip
def test_what_is_no_run_of_the_senders_is_not_received(message: bytes) -> None:
    inbox, _, library = _run_inbox()
    with pytest.raises(FrameError):
        inbox.accept(message)
    assert inbox.take() is None
    assert not inbox.expects()
    library.lines[0].abort()


def test_what_comes_behind_a_run_is_heard_behind_it() -> None:
    inbox, staging, library = _run_inbox()
    inbox.accept(_names(2, 3))
    inbox.accept(encode(Quiet(5)))
    assert inbox.take() is None
    assert inbox.expects()
    assert staging.count(Owner.RECEIVER) == 2
    inbox._posted.arrived = True  # type: ignore[union-attr]
    heard = [inbox.take() for _ in range(4)]
    assert [getattr(frame, "staging", None) for frame in heard] == [2, 3, None, None]
    assert heard[2] == Quiet(5)
    library.lines[0].abort()


def test_between_devices_a_piece_is_heard_before_it_has_landed() -> None:
    """It has when its bytes and its sum are here, and all before it have."""
    inbox, staging, library = _run_inbox(between_devices=True)
    for index in (2, 3):
        inbox.accept(_names(index))
    heard = [inbox.take(), inbox.take(), inbox.take()]
    assert [getattr(frame, "staging", None) for frame in heard] == [2, 3, None]
    runs = list(inbox._landing)
    assert inbox.landed() == 0
    runs[1].arrived = True
    inbox.accept(encode(Summed(3, 33)))
    assert inbox.landed() == 0
    inbox.accept(encode(Summed(2, 22)))
    assert inbox.landed() == 0
    runs[0].arrived = True
    assert inbox.landed() == 2
    assert [inbox.checksum(piece) for piece in heard[:2] if isinstance(piece, Piece)] == [22, 33]
    with pytest.raises(FrameError, match="none is awaited"):
        inbox.accept(encode(Summed(3, 33)))
    assert staging.count(Owner.RECEIVER) == 2
    library.lines[0].abort()


def test_the_greeting_is_compared(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that brings something else carries no block."""
    monkeypatch.setattr("kvtransfer.nccl_connector.greeting", lambda link_id: b"?" * GREETING_BYTES)
    peers = linked.peers
    peers.send(1, [[1]], [[1]])
    peers.run_until(lambda: 1 in peers.failures())
    assert "greeting" in peers.failures()[1].message
    assert peers.receiver.counters.bytes_received == 0
    assert linked.send(2) == "grpc"
