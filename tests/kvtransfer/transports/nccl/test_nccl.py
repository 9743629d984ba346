"""nccl links over a double of NCCL: where bytes go, when a window is fenced, what follows if NCCL hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from baton.base.errors import BatonError
from baton.device.nccl import nccl_channel
from baton.device.nccl.nccl_library import Result
from baton.device.streams.stream import Event
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.protocol.frames import Piece, StopAck, encode, encode_piece_header
from kvtransfer.sender.events import Acknowledged
from kvtransfer.sender.routes import MAX_PAUSE_S
from kvtransfer.transports.grpc.connector import GrpcConnector
from kvtransfer.transports.grpc.listener import GrpcListener
from kvtransfer.transports.nccl.endpoint import SENDER_RANK, NcclEndpoint
from kvtransfer.transports.nccl.sender_wire import NcclSenderWire
from tests.kvtransfer.support.device_ends import streams_of
from tests.kvtransfer.support.device_rigs import FakeRig
from tests.kvtransfer.support.nccl_transport import NcclTransport
from tests.kvtransfer.support.peers import Peers, Shape, make_peers
from tests.support.events import FakeEvent

SHAPE = Shape(block_bytes=(8192,), window_pieces=8)


class Linked:
    """Peers on fake devices that have nccl, and grpc as the second way."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.later_s = 0.0
        self.rig = FakeRig(None)
        self.nccl = NcclTransport(self.woken.set, self.rig)
        listener = self.nccl.listener()
        self.peers = make_peers(
            SHAPE, listener=listener, woken=self.woken, rig=self.rig,
            clock=lambda: time.monotonic() + self.later_s,
            ways=lambda wake, blocks: (self.nccl.connect(wake, blocks), GrpcConnector(wake)),
        )  # fmt: skip
        settings = ListenerSettings(self.woken.set, 1.0, 8)
        second = GrpcListener("127.0.0.1", 0, settings, piece_bytes=4096)
        self.peers.receiver.attach(second)
        self.peers.endpoints = (listener.endpoint, second.endpoint)

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
        until(self.peers, lambda: not self.nccl.receiving.aborting + self.nccl.sending.aborting)


def until(peers: Peers, holds: object) -> None:
    peers.run_until(holds)  # type: ignore[arg-type]


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    yield made
    made.close()


def test_bytes_go_from_staging_to_staging(linked: Linked) -> None:
    """The same index on both sides, and with them what the sender's device found of their sum."""
    assert linked.send(1) == "nccl"
    (ours,), (theirs,) = linked.nccl.sending.stagings, linked.nccl.receiving.stagings
    moved = linked.peers.receiver.counters.bytes_received
    assert moved == 4 * 8192
    assert torch.equal(ours.memory.tensor, theirs.memory.tensor)
    assert ours.parts(0).any()
    linked.peers.check_ledger()
    assert linked.peers.sender.counters.link_fallbacks == 0


def test_a_receive_without_a_sender_is_aborted(linked: Linked) -> None:
    """The sender's device stops within a piece: its window is fenced by our own abort, and by nothing
    less."""
    assert linked.send(1) == "nccl"
    peers, links = linked.peers, linked.nccl.receiving
    channel, window = links.channels[0], links.stagings[0]
    assert channel.receive(window.address_of(0), 4096)  # what is never sent
    links.double.hangs.set()
    linked.nccl.sending.channels[0].abort("killed")
    peers.run_until(lambda: peers.receiver.counters.links_broken == 1)
    for _ in range(20):
        peers.receiver.poll(10)
        time.sleep(0.005)
    (report,) = peers.receiver.links
    assert report.quarantined_pieces == report.window_pieces
    assert not channel.terminated
    links.double.hangs.clear()
    peers.run_until(lambda: peers.receiver.links == [])
    assert peers.receiver.counters.links_fenced == 1
    assert channel.terminated


def test_a_link_that_broke_is_followed_by_one_over_grpc(linked: Linked) -> None:
    assert linked.send(1) == "nccl"
    linked.nccl.sending.double.fails = Result.REMOTE_ERROR
    linked.peers.run_until(lambda: not linked.peers.sender.links)
    assert linked.send(2) == "grpc"
    assert linked.peers.sender.counters.link_fallbacks == 1


def test_ends_that_do_not_connect_fall_back_to_grpc(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer fails of it."""
    monkeypatch.setattr(linked.nccl.receiving.double, "fails", Result.SYSTEM_ERROR)
    assert linked.send(1) == "grpc"
    assert linked.peers.sender.counters.link_fallbacks == 1
    assert not linked.peers.failures()


def test_after_a_hung_abort_nccl_is_not_used(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permanently, even if the abort returns later."""
    monkeypatch.setattr(nccl_channel, "ABORT_TIMEOUT_S", 0.1)
    assert linked.send(1) == "nccl"
    links, double = linked.nccl.sending, linked.nccl.sending.double
    double.hangs.set()
    links.channels[0].abort("cut")
    assert not links.hung
    linked.peers.run_until(lambda: links.hung and not linked.peers.sender.links)
    linked.later_s = MAX_PAUSE_S  # it would try nccl first
    assert linked.send(2) == "grpc"
    assert links.aborting == 1
    double.hangs.clear()
    linked.peers.run_until(lambda: links.aborting == 0)
    assert links.hung
    with pytest.raises(BatonError, match="did not abort a channel"):
        links.channel(links.unique_id(), SENDER_RANK, lambda: None)


def test_a_receiver_whose_nccl_has_hung_is_reached_over_grpc(
    linked: Linked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback is immediate: the sender's request was not judged, and no transfer fails."""
    hung = property(lambda endpoint: endpoint is linked.nccl.receiving)
    monkeypatch.setattr(NcclEndpoint, "hung", hung)
    assert linked.send(1) == "grpc"
    assert not linked.peers.failures()
    assert linked.peers.sender.counters.link_fallbacks == 1
    assert linked.peers.receiver.counters.links_refused == 1


def test_blocks_are_gathered_when_their_step_has_ended(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And announced before, whatever the host does then."""
    assert linked.send(1) == "nccl"
    (stream,), ended, enqueued = streams_of(linked.rig.sender), FakeEvent(complete=True), list[object]()
    after, run = stream.wait_event, stream.run

    def noted_after(event: Event) -> None:
        enqueued.append(event)
        after(event)

    def noted_run(work: Callable[[], None]) -> None:
        enqueued.append("gather")
        run(work)

    monkeypatch.setattr(stream, "wait_event", noted_after)
    monkeypatch.setattr(stream, "run", noted_run)
    peers = linked.peers
    peers.expect(2, [[3]])
    transfer = peers.begin(2, [1])
    peers.source.pin(0, 5)
    transfer.push(0, 0, [5], ended)
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 2 in peers.acknowledged())
    assert enqueued == [ended, "gather"] * 2  # pieces of the block
    assert peers.equal([[5]], [[3]])
    peers.check_ledger()


def test_a_channel_of_a_lost_peer_is_aborted_while_its_loop_is_blocked(linked: Linked) -> None:
    """The loop may be blocked by the very channel that only it would abort."""
    assert linked.send(1) == "nccl"
    channels = [*linked.nccl.sending.channels, *linked.nccl.receiving.channels]
    assert len(channels) == 2
    time.sleep(0.7)
    assert not any(channel.aborting for channel in channels), "their peers are there"
    sending_wire(linked).keepalive.close()  # and neither loop looks
    until_s = time.monotonic() + 5.0
    while not all(channel.terminated for channel in channels):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    linked.peers.run_until(lambda: not linked.peers.sender.links and not linked.peers.receiver.links)
    assert linked.peers.receiver.counters.links_fenced == 1


def sending_wire(linked: Linked) -> NcclSenderWire:
    """The sender's end of the one link there was."""
    (wire,) = linked.peers.wires
    assert isinstance(wire, NcclSenderWire)
    return wire


def names(*indices: int, length: int = 4096) -> bytes:
    return b"".join(encode_piece_header(Piece(1, 0, n, 0, length, n, 7)) for n in indices)


@pytest.mark.parametrize(
    "message",
    [names(9), names(0, 0), names(1, length=4097), names(1, 2) + b"x", names(1) + encode(StopAck(3)), b""],
    ids=["far", "twice", "too long", "crumbs", "mixed", "nothing"],
)
def test_a_malformed_frame_breaks_the_link(
    linked: Linked, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """And no receive is posted for an index that is not the sender's."""
    caplog.set_level(logging.INFO)
    linked.send(1)
    sending_wire(linked).frames.add(message)
    linked.peers.run_until(lambda: linked.peers.receiver.counters.links_broken == 1)
    ended = [line for line in caplog.records if line.name == "kvtransfer.receiver.link_table"]
    assert [line.__dict__["reason"].partition(":")[0] for line in ended] == ["malformed frame"]
    until(linked.peers, lambda: not linked.peers.sender.links)
    assert linked.send(2) == "grpc"


def test_a_piece_is_received_before_its_bytes_arrive(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece's receive waits for the bytes; later pieces arrive after it."""
    linked.send(1)
    counters = linked.peers.receiver.counters
    before = counters.bytes_received
    posted: list[int] = []
    (channel,) = linked.nccl.receiving.channels
    receive = channel.receive

    def noted(address: int, size: int) -> Event | None:
        posted.append(address)
        return receive(address, size)

    monkeypatch.setattr(channel, "receive", noted)
    (stopped,) = linked.nccl.sending.double.streams.values()
    goes_on = threading.Event()
    stopped.add(lambda: _wait(goes_on))
    peers = linked.peers
    peers.send(2, [[1, 2]], [[30, 31]])
    peers.run_until(lambda: len(posted) == 4)
    assert counters.bytes_received == before
    assert peers.receiver.busy_poll
    goes_on.set()
    peers.run_until(lambda: 2 in peers.acknowledged())
    assert (len(posted), counters.bytes_received) == (4, before + 2 * 8192)
    assert peers.equal([[1, 2]], [[30, 31]])


def test_frames_over_the_keepalive_break_the_link(linked: Linked) -> None:
    """The keepalive stream carries no frames."""
    linked.send(1)
    sending_wire(linked).keepalive.send(StopAck(3))
    until(linked.peers, lambda: not linked.peers.sender.links)
    assert linked.peers.receiver.counters.links_broken == 1
    assert linked.send(2) == "grpc"


def _wait(event: threading.Event) -> None:
    event.wait(5)
