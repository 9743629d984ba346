"""Pieces and commits received before their bytes arrive or their step ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.receiver.events import CommitPending, Committed, TransferStarted
from kvtransfer.sender.events import Acknowledged
from kvtransfer.sender.transfer import Transfer
from tests.kvtransfer.support.device_ends import SHAPE, Ends, device_wire, sent, windows
from tests.kvtransfer.support.peers import Peers
from tests.support.events import FakeEvent


def announced(peers: Peers, ends: Ends) -> None:
    """Transfer 2, of two blocks and its commit, is received before any of its bytes; the devices
    stand."""
    sent(peers, 1)
    ends.rig.pump.stands = True
    peers.expect(2, [[11, 12], []])
    transfer = peers.begin(2, [2, 0])
    peers.push_all(transfer, [[4, 5]])
    transfer.commit(peers.record(transfer))
    peers.sender.poll(9)
    events = peers.receiver.poll(9)
    assert [type(event) for event in events] == [TransferStarted, CommitPending]
    assert events[1].transfer_id == 2


def test_a_commit_is_checked_and_reported_before_its_bytes_arrive(ends: Ends) -> None:
    peers = ends()
    announced(peers, ends)
    ends.rig.pump.stands = False
    peers.run_until(lambda: 2 in peers.acknowledged())
    assert peers.equal([[4, 5], []], [[11, 12], []])
    peers.check_ledger()


class Meanwhile:
    """A listener that no peer calls: the receiver looks for requests before it handles frames."""

    endpoint = Endpoint("memory", "meanwhile")

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def next_request(self) -> None:
        self._do()

    def close(self) -> None:
        """Does nothing: it has no resources."""


def test_a_commit_during_frame_handling_is_reported_at_once_and_before_its_credits(ends: Ends) -> None:
    peers = ends()
    announced(peers, ends)

    def all_steps() -> None:
        while ends.rig.pump.step_one():
            pass

    all_steps()  # the bytes come
    assert peers.receiver.poll(9) == []

    peers.receiver.attach(Meanwhile(all_steps))
    (committed,) = peers.receiver.poll(9)
    assert isinstance(committed, Committed)
    peers.sender.poll(9)
    assert free(peers) == SHAPE.window_pieces - 2
    peers.receiver.transfers.acknowledge(2)
    assert [type(event) for event in peers.sender.poll(9)] == [Acknowledged]
    peers.sender.poll(9)
    assert free(peers) == SHAPE.window_pieces
    ends.rig.pump.stands = False
    peers.check_ledger()


def test_credits_wait_for_an_admission_unless_there_is_more_to_send(ends: Ends) -> None:
    peers = ends()
    announced(peers, ends)
    before = peers.receiver.counters.bytes_received
    while peers.receiver.counters.bytes_received == before:
        ends.rig.pump.step_one()
        peers.receiver.poll(9)
    assert peers.receiver.counters.bytes_received == before + SHAPE.block_bytes[0]
    peers.sender.poll(9)
    assert free(peers) == SHAPE.window_pieces - 2
    peers.expect(3, [[13, 14], []])
    transfer = peers.begin(3, [2, 0])
    peers.push(transfer, 0, 0, 6)
    peers.sender.poll(9)
    assert free(peers) == SHAPE.window_pieces - 3
    peers.receiver.poll(9)
    peers.sender.poll(9)
    assert free(peers) == SHAPE.window_pieces - 2
    ends.rig.pump.stands = False
    transfer.withdraw(WithdrawReason.ABORTED)
    peers.run_until(lambda: 2 in peers.acknowledged() and 3 in peers.withdrawn())
    peers.check_ledger()


def free(peers: Peers) -> int:
    """The number of the sender's free credits."""
    return peers.sender.links[0].free_pieces


def test_a_transfer_forgotten_before_its_bytes_arrive_is_not_written(ends: Ends) -> None:
    """The transfer's credits return only once their indices can no longer be written."""
    peers = ends()
    announced(peers, ends)
    peers.forget(2)
    before = peers.sink.groups[0].copy()
    peers.receiver.poll(9)
    (link,) = peers.receiver.links
    assert link.credited_pieces == link.window_pieces - 2, "one for each of its blocks"
    ends.rig.pump.stands = False
    peers.run_until(lambda: 2 in peers.failures())
    peers.check_ledger()
    assert (peers.sink.groups[0] == before).all()
    assert sent(peers, 3) == "ipc"


def test_announced_pieces_that_never_arrive_are_withdrawn_with_their_link(ends: Ends) -> None:
    peers = ends()
    announced(peers, ends)
    wire = device_wire(peers)
    assert wire.control is not None
    wire.control.end()
    deadline = time.monotonic() + 5
    while not peers.withdrawn():  # the device does nothing meanwhile
        peers.received += peers.receiver.poll(4)
        assert time.monotonic() < deadline
    before = peers.sink.groups[0].copy()
    assert peers.withdrawn()[2].reason is WithdrawReason.LINK_LOST
    (link,) = peers.receiver.links
    assert link.quarantined_pieces == link.window_pieces
    ends.rig.pump.stands = False
    for _ in range(200):
        ends.rig.advance()
    assert (peers.sink.groups[0] == before).all()


def begun_before_its_step_ends(peers: Peers, later: FakeEvent) -> Transfer:
    """Blocks 5 and 6 of the second group, which are not computed yet."""
    peers.expect(1, [[], [3, 4]])
    transfer = peers.begin(1, [0, 2])
    peers.run_until(lambda: peers.sender.links[0].window_pieces > 0)
    for ordinal, block in enumerate((5, 6)):
        peers.source.pin(1, block)
        transfer.push(1, ordinal, [block], later)
    for _ in range(50):
        peers.step()
    return transfer


@pytest.mark.parametrize("on_device", [True, False])
def test_blocks_are_read_when_their_step_has_ended(ends: Ends, on_device: bool) -> None:
    peers, later = ends(sender=on_device), FakeEvent()
    transfer = begun_before_its_step_ends(peers, later)
    started = any(isinstance(event, TransferStarted) for event in peers.received)
    assert started is on_device, "announced before"
    assert peers.receiver.counters.bytes_received == 0
    peers.source.groups[1][5:7] = 77  # only now
    later.complete = True
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: peers.acknowledged() == [1])
    assert (peers.sink.groups[1][3:5] == 77).all()
    peers.check_ledger()


def test_a_transfer_withdrawn_before_its_step_ends(ends: Ends) -> None:
    """The transfer's blocks may be computed all the same: nothing of them is written there, and all credits
    come home."""
    peers, later = ends(), FakeEvent()
    before = peers.sink.groups[1].copy()
    transfer = begun_before_its_step_ends(peers, later)
    transfer.withdraw(WithdrawReason.ABORTED)
    peers.run_until(lambda: len(peers.receiver.transfers) == 0)
    assert peers.source.pins, "the device has not read them"
    later.complete = True
    peers.run_until(lambda: not peers.source.pins and peers.sender.links[0].credited_pieces == 0)
    assert (peers.sink.groups[1] == before).all()
    peers.check_ledger()


def test_a_link_that_breaks_before_its_step_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's device cannot be stopped, so breaking the link waits for the step, and the receiver waits
    for the sender."""
    peers, later = ends(), FakeEvent()
    begun_before_its_step_ends(peers, later)
    cut = BatonError(ErrorKind.UNAVAILABLE, "cut")
    monkeypatch.setattr(device_wire(peers), "failure", lambda: cut)
    ending = threading.Timer(0.05, setattr, (later, "complete", True))
    ending.start()
    peers.run_until(lambda: 1 in peers.failures() and 1 in peers.withdrawn())
    ending.join()
    assert not peers.source.pins
    before = peers.sink.groups[1].copy()  # what arrived while its blocks were reserved
    peers.run_until(lambda: windows(ends) == [True])
    assert (peers.sink.groups[1] == before).all()
    assert sent(peers, 2) == "grpc", "the next way"
