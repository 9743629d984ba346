"""Links that break: how it is detected, what is quarantined until when, and what continues."""

from __future__ import annotations

import threading
import time

import pytest

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import Credit, FrameError, WithdrawReason, encode
from kvtransfer.protocol.handshake import link_request
from kvtransfer.receiver.events import Committed, TransferStarted
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.link.memory_links import SHAPE, Memory
from tests.kvtransfer.support.memory_transport import MemorySenderWire
from tests.kvtransfer.support.peers import FINGERPRINT, identity, make_sender


def test_a_dead_senders_credits_are_quarantined_until_the_fence() -> None:
    memory = Memory()
    peers = memory.half_way()
    pipe = memory.transport.pipes[0]
    pipe.hold_fence = True
    pipe.break_off(BatonError(ErrorKind.UNAVAILABLE, "killed"))
    peers.run_until(lambda: 1 in peers.withdrawn() and 1 in peers.failures())
    assert peers.withdrawn()[1].reason is WithdrawReason.LINK_LOST
    for _ in range(5):
        memory.clock.now += 1000  # no timer ends it
        peers.receiver.poll(10)
    (report,) = peers.receiver.links
    assert report.quarantined_pieces == report.window_pieces
    assert report.credited_pieces == 0
    assert report.live_transfers == 0
    pipe.hold_fence = False
    peers.receiver.poll(10)
    assert peers.receiver.links == []
    assert peers.receiver.counters.links_fenced == 1
    peers.close()


def test_frames_received_before_the_break_still_count() -> None:
    memory = Memory()
    peers = memory.peers
    peers.begin(9, [0]).withdraw(WithdrawReason.FINISHED)
    peers.run_until(lambda: peers.sender.counters.links_opened == 1)
    peers.send(1, [[1]], [[1]])
    peers.sender.poll(4)
    assert len(memory.transport.pipes[0].to_receiver) >= 2
    memory.transport.pipes[0].break_off(BatonError(ErrorKind.UNAVAILABLE, "killed"))
    peers.run_until(lambda: any(isinstance(event, Committed) for event in peers.received))
    assert peers.equal([[1]], [[1]])
    assert not peers.withdrawn()
    peers.close()


def test_progress_is_reported_by_the_next_poll_unless_forgotten() -> None:
    peers = Memory().peers
    for transfer in (1, 2):
        peers.send(transfer, [[transfer]], [[transfer]])

    def both_are_here() -> bool:
        peers.sender.poll(4)
        peers.receiver.progress(4)
        return peers.equal([[1, 2]], [[1, 2]]) and all(
            link.live_transfers == 0 for link in peers.receiver.links
        )

    while not both_are_here():
        assert not peers.received
    peers.forget(1)
    reported = peers.receiver.poll(4)
    assert [(type(event), event.transfer_id) for event in reported] == [(TransferStarted, 2), (Committed, 2)]
    peers.receiver.transfers.acknowledge(2)
    peers.run_until(lambda: peers.acknowledged() == [2])
    peers.close()


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_new_link_of_the_same_sender_fences_the_old_one(link_peers: LinkPeers, incarnation: int) -> None:
    peers = link_peers(SHAPE)
    peers.expect(1, [list(range(20))])
    peers.push_all(peers.begin(1, [20]), [list(range(20))])  # uncommitted: it cannot end before the new link
    peers.run_until(lambda: len(peers.sink.scattered) >= 3)
    again = make_sender(
        SHAPE, peers.source, link_peers.woken.set, time.monotonic, [link_peers.connector],
        incarnation=incarnation,
    )  # fmt: skip
    peers.expect(2, [[30]])
    transfer = again.begin(*peers.ticket(2, [1]))
    peers.source.pin(0, 30)
    transfer.push(0, 0, [30])
    transfer.commit(peers.record(transfer))
    late: list[object] = []

    def both() -> bool:
        late.extend(again.poll(4))
        return bool(late) and 1 in peers.withdrawn() and 1 in peers.failures()

    peers.run_until(both)
    assert peers.withdrawn()[1].reason is WithdrawReason.LINK_LOST
    assert "newer link" in peers.withdrawn()[1].message
    assert peers.equal([[30]], [[30]])
    peers.run_until(lambda: peers.receiver.counters.links_fenced == 1)
    assert len(peers.receiver.links) == 1
    again.close()


def test_a_dead_receiver_fails_its_transfers_and_a_restarted_one_is_a_new_peer(
    link_peers: LinkPeers,
) -> None:
    peers = link_peers(SHAPE)
    peers.send(1, [list(range(20))], [list(range(20))])
    peers.run_until(lambda: len(peers.sink.scattered) >= 3)
    peers.receiver.close()
    while 1 not in peers.failures():
        peers.sent += peers.sender.poll(4)
    assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
    assert not peers.source.pins
    assert peers.sender.links == []
    fresh = link_peers(SHAPE)
    fresh.send(1, [[3]], [[4]])
    fresh.run_until(lambda: fresh.acknowledged() == [1])
    fresh.check_ledger()


def test_a_receiver_that_returns_no_credit_fails_the_link() -> None:
    memory = Memory()
    peers = memory.half_way()
    memory.connector.deaf = True
    peers.step()
    memory.clock.now += SHAPE.timeout_s + 0.1
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
    assert "no credit" in peers.failures()[1].message
    assert not peers.source.pins
    peers.run_until(lambda: peers.receiver.links == [])
    peers.close()


def test_an_idle_link_does_not_time_out() -> None:
    memory = Memory()
    peers = memory.peers
    for transfer in (1, 2):
        peers.send(transfer, [[transfer]], [[transfer]])
        peers.run_until(lambda transfer=transfer: transfer in peers.acknowledged())  # type: ignore[misc]
        peers.settle()
        memory.clock.now += 1000
        for _ in range(5):
            peers.step()
    assert peers.sender.counters.links_opened == 1
    assert peers.sender.counters.links_broken == 0
    peers.close()


def test_an_unanswered_commit_has_a_deadline() -> None:
    memory = Memory()
    peers = memory.peers
    peers.answers = False
    peers.send(1, [[1]], [[1]])
    peers.run_until(lambda: any(isinstance(event, Committed) for event in peers.received))
    memory.clock.now += SHAPE.timeout_s + 0.1
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.DEADLINE
    assert peers.failures()[1].cause is FailureCause.LINK
    peers.receiver.transfers.acknowledge(1)  # too late: counted, and no second event
    peers.run_until(lambda: peers.sender.counters.dropped_unknown == 1)
    assert peers.acknowledged() == []
    peers.check_ledger()
    peers.close()


def test_a_sender_that_does_not_answer_a_stop_loses_its_link() -> None:
    memory = Memory()
    peers = memory.half_way()
    memory.connector.mute = True
    peers.forget(1)
    peers.run_until(lambda: 1 in peers.failures())
    memory.clock.now += SHAPE.timeout_s + 0.1
    peers.run_until(lambda: peers.receiver.counters.links_broken == 1)
    peers.run_until(lambda: peers.receiver.links == [] and peers.sender.links == [])
    peers.close()


def test_a_sender_that_never_connects_to_its_link_loses_it() -> None:
    memory = Memory()
    peers = memory.peers
    request = link_request(identity("ghost"), identity("receiver").incarnation, FINGERPRINT, 1)
    opened: list[object] = []
    thread = threading.Thread(
        target=lambda: opened.append(memory.transport.open(memory.transport.endpoint, request, 2.0))
    )
    thread.start()
    peers.run_until(lambda: bool(opened))
    thread.join()
    memory.transport.pipes[0].sender_came = False
    memory.clock.now += SHAPE.timeout_s + 0.1
    peers.run_until(lambda: peers.receiver.links == [])
    assert peers.receiver.counters.links_broken == 1
    peers.close()


def test_a_credit_that_was_not_in_use_breaks_the_link() -> None:
    memory = Memory()
    peers = memory.half_way()
    memory.transport.pipes[0].to_sender.append(encode(Credit((0, 0))))
    peers.run_until(lambda: 1 in peers.failures())
    assert "was not in use" in peers.failures()[1].message
    assert peers.failures()[1].cause is FailureCause.LINK
    assert not peers.source.pins
    peers.close()


def test_a_sender_that_cuts_blocks_otherwise_loses_the_link_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender misread the size of pieces when its link was opened: the link could not carry anything."""
    memory = Memory()
    peers, whole_open = memory.peers, memory.transport.open

    def open_wrongly(
        endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, MemorySenderWire]:
        response, wire = whole_open(endpoint, request, timeout_s)
        response.piece_bytes //= 2
        monkeypatch.undo()
        return response, wire

    monkeypatch.setattr(memory.transport, "open", open_wrongly)
    peers.send(1, [[1, 2]], [[1, 2]])
    peers.run_until(lambda: 1 in peers.withdrawn() and 1 in peers.failures())
    assert "blocks are not cut into such pieces" in peers.withdrawn()[1].message
    assert peers.withdrawn()[1].reason is WithdrawReason.LINK_LOST
    assert not peers.sink.scattered
    peers.send(2, [[2]], [[2]])
    peers.run_until(lambda: 2 in peers.acknowledged())
    assert peers.equal([[2]], [[2]])
    peers.check_ledger()
    assert peers.receiver.counters.links_fenced == 1
    peers.close()


def test_a_malformed_frame_names_its_fault() -> None:
    memory = Memory()
    peers = memory.half_way()
    memory.transport.pipes[0].to_receiver.append(b"nonsense")
    peers.run_until(lambda: 1 in peers.withdrawn() and 1 in peers.failures())
    assert "malformed frame: 8 bytes are shorter than a header" in peers.withdrawn()[1].message
    assert isinstance(memory.transport.pipes[0].error, FrameError)
    peers.run_until(lambda: peers.receiver.links == [])
    peers.close()
