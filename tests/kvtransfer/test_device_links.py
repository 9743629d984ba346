"""Links between devices, and what becomes of those that cannot be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest

from baton.errors import BatonError, ErrorKind
from kvtransfer.device_blocks import DeviceBlocks, DeviceSink
from kvtransfer.events import Acknowledged, Announced, Arrived, Committed
from kvtransfer.frames import WithdrawReason
from kvtransfer.ipc_control import Word
from kvtransfer.ipc_device_wire import IpcDeviceWire
from kvtransfer.outgoing import Transfer
from kvtransfer.sending_link import SendingLink
from kvtransfer.transport import LandingWire
from kvtransfer.transports import connectors_of
from tests.kvtransfer.device_rigs import FakeRig
from tests.kvtransfer.fake_device import FakeDevice, Pump
from tests.kvtransfer.peers import Peers, Shape, Store, make_receiver, make_sender

SHAPE = Shape(block_bytes=(4096, 512), piece_bytes=4096, window_pieces=4)


class Ends:
    """Two ends told to use what they have (`auto`), each with a device or without; nothing in between."""

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
        address = receiving.listen("127.0.0.1", transport=transport)
        blocks = DeviceBlocks(self.rig.sender, ours) if sender else None
        sending = make_sender(SHAPE, source, woken.set, self._clock, connectors_of("auto", woken.set, blocks))

        def advance() -> None:
            woken.wait(self.rig.advance())
            woken.clear()

        self.made.append(Peers(SHAPE, receiving, sending, address, source, sink, advance, on_device=True))
        return self.made[-1]

    @staticmethod
    def _clock() -> float:
        return time.monotonic()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for peers in made.made:
        peers.close()


def link_of(peers: Peers) -> SendingLink:
    (link,) = peers.sender._links.values()
    return link


def device_wire(peers: Peers) -> IpcDeviceWire:
    window = link_of(peers)._window
    assert window is not None
    assert isinstance(window.wire, IpcDeviceWire)
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


def test_several_blocks_are_one_piece(ends: Ends) -> None:
    """Those that follow each other at the receiver, wherever they lie here and there."""
    peers = ends()
    places = [[], [30, 2, 17, 5, 9, 40, 11]]
    peers.send(1, [[], [3, 1, 60, 8, 20, 33, 7]], places)
    peers.run_until(lambda: peers.acknowledged() == [1])
    assert peers.equal([[], [3, 1, 60, 8, 20, 33, 7]], places)
    assert peers.receiver.counters.blocks_received == [0, 7]
    wire = device_wire(peers)
    assert wire.gathered() == 2  # a small one first, since nothing was on the wire
    peers.check_ledger()


def test_a_device_that_is_not_reached_is_served_over_grpc(ends: Ends) -> None:
    ends.rig.sender = FakeDevice(ends.rig.pump, "fake:0")
    peers = ends()
    assert sent(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    assert windows(ends) == []


@pytest.mark.parametrize(("sender", "receiver"), [(True, False), (False, True)])
def test_where_one_end_has_no_device_the_host_carries_it(ends: Ends, sender: bool, receiver: bool) -> None:
    peers = ends(sender=sender, receiver=receiver)
    assert sent(peers, 1) == "ipc"
    assert peers.sender.counters.link_fallbacks == 0
    assert windows(ends) == []


def test_a_sender_that_finds_only_then_that_it_cannot_write_goes_over_grpc(ends: Ends) -> None:
    """As one does that does not see the receiver's GPU, and so has to try."""
    peers = ends()
    assert isinstance(ends.rig.sender, FakeDevice)
    ends.rig.sender.blind = True
    assert sent(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    peers.run_until(lambda: windows(ends) == [True])


def test_a_receiver_without_room_for_a_window_says_so_and_goes_over_grpc(ends: Ends) -> None:
    peers = ends()
    assert isinstance(ends.rig.receiver, FakeDevice)
    ends.rig.receiver.full = True
    peers.send(1, [[1], []], [[2], []])
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.OVERLOADED
    peers.forget(1)
    assert sent(peers, 2) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1


def test_a_window_goes_back_when_its_sender_has_closed_it_and_no_sooner(ends: Ends) -> None:
    peers = ends()
    sent(peers, 1)
    wire = device_wire(peers)
    assert wire._control is not None
    wire._control.end()  # the socket's end says nothing of a process that lives
    peers.run_until(lambda: bool(peers.receiver.links and peers.receiver.links[0].quarantined_pieces))
    assert windows(ends) == [False]
    peers.run_until(lambda: not peers.sender.links)


def test_what_was_said_to_a_device_is_done_before_its_link_is_fenced(ends: Ends) -> None:
    """Bytes that came later would land in memory that is another's."""
    peers = ends()
    peers.expect(1, [list(range(20)), []])
    transfer = peers.begin(1, [20, 0])
    peers.push_all(transfer, [list(range(20)), []])
    peers.run_until(lambda: bool(peers.sender.links) and peers.sender.links[0].credited_pieces > 0)
    wire = device_wire(peers)
    assert not ends.rig.pump.idle()
    wire.close()
    assert ends.rig.pump.idle() or not wire._gather.busy
    peers.run_until(lambda: windows(ends) == [True])
    before = ends.rig.receiver.allocated[0].tensor.clone()  # type: ignore[attr-defined]
    for _ in range(200):
        ends.rig.advance()
    assert bool((ends.rig.receiver.allocated[0].tensor == before).all())  # type: ignore[attr-defined]


def test_a_receiver_that_slept_is_woken_before_the_bytes_and_sleeps_no_more_until_they_are_there(
    ends: Ends,
) -> None:
    peers = ends()
    sent(peers, 1)
    wire = device_wire(peers)
    assert wire._control is not None

    time.sleep(0.01)
    assert not peers.receiver.restless  # it has looked in vain for a while, and wants a bell from here on
    said: list[Word] = []
    wire._control.say = lambda word: said.append(word)  # type: ignore[method-assign]
    before = peers.receiver.counters.bytes_received
    ends.rig.pump.stands = True
    peers.expect(2, [[1], []])
    transfer = peers.begin(2, [1, 0])
    peers.push(transfer, 0, 0, 1)
    peers.sender.poll(4)
    assert said == [Word.BELL]
    peers.receiver.poll(4)  # the piece is announced
    time.sleep(0.01)
    assert peers.receiver.restless
    assert peers.receiver.counters.bytes_received == before
    ends.rig.pump.stands = False
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 2 in peers.acknowledged())
    peers.check_ledger()


def announced(peers: Peers, ends: Ends) -> None:
    """Transfer 2, of two blocks and its commit, is heard before any byte of it is there; the devices
    stand."""
    sent(peers, 1)
    ends.rig.pump.stands = True
    peers.expect(2, [[11, 12], []])
    transfer = peers.begin(2, [2, 0])
    peers.push_all(transfer, [[4, 5]])
    transfer.commit(peers.record(transfer))
    peers.sender.poll(9)
    events = peers.receiver.poll(9)
    assert [type(event) for event in events] == [Arrived, Announced]
    assert events[1].transfer_id == 2


def test_a_commit_is_checked_and_told_before_its_bytes_are_there(ends: Ends) -> None:
    peers = ends()
    announced(peers, ends)
    ends.rig.pump.stands = False
    peers.run_until(lambda: 2 in peers.acknowledged())
    assert peers.equal([[4, 5], []], [[11, 12], []])
    peers.check_ledger()


def test_what_ends_while_frames_are_heard_is_told_at_once_and_before_its_credits(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = ends()
    announced(peers, ends)
    take_calls = peers.receiver._links.take_calls

    def meanwhile() -> None:
        while one_step(ends.rig.pump):
            pass
        take_calls()

    while one_step(ends.rig.pump):  # the bytes come
        pass
    assert peers.receiver.poll(9) == []

    monkeypatch.setattr(peers.receiver._links, "take_calls", meanwhile)
    (committed,) = peers.receiver.poll(9)
    assert isinstance(committed, Committed)
    peers.sender.poll(9)
    assert free(peers) == SHAPE.window_pieces - 2
    peers.receiver.acknowledge(2)
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
        one_step(ends.rig.pump)
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


def one_step(pump: Pump) -> bool:
    """The devices stand, but for this; False where they can do nothing."""
    able = [line for line in pump._lines if line.able()]
    if able:
        able[0].step()
    return bool(able)


def free(peers: Peers) -> int:
    """Credits that the sender has at home."""
    return peers.sender.links[0].free_pieces


def test_what_is_forgotten_before_it_is_there_is_written_nowhere(ends: Ends) -> None:
    """Its credits come home when nobody can write their places any more, and no sooner."""
    peers = ends()
    announced(peers, ends)
    peers.forget(2)
    before = peers.sink.groups[0].copy()
    (receiving,) = peers.receiver._links
    there = cast(LandingWire, receiving._wire).landed()
    peers.receiver.poll(9)
    (link,) = peers.receiver.links
    assert link.credited_pieces == link.window_pieces - (device_wire(peers)._gather._sent - there)
    ends.rig.pump.stands = False
    peers.run_until(lambda: 2 in peers.failures())
    peers.check_ledger()
    assert (peers.sink.groups[0] == before).all()
    assert sent(peers, 3) == "ipc"


def test_what_was_announced_and_never_came_is_withdrawn_with_its_link(ends: Ends) -> None:
    peers = ends()
    announced(peers, ends)
    wire = device_wire(peers)
    assert wire._control is not None
    wire._control.end()
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


def test_a_receiver_that_expects_a_device_looks_sooner(ends: Ends) -> None:
    peers = ends()
    peers.expect(1, [[1], []])
    assert not peers.receiver.expectant  # over what, nobody knows yet
    transfer = peers.begin(1, [1, 0])
    peers.push(transfer, 0, 0, 1)
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 1 in peers.acknowledged())
    assert not peers.receiver.expectant
    peers.expect(2, [[1], []])
    assert peers.receiver.expectant
    peers.forget(2)


def test_who_does_not_sleep_is_rung_no_bell(ends: Ends) -> None:
    """However long ago the last word was: a loop that looks in vain and does not sleep wants none."""
    peers = ends()
    sent(peers, 1)
    time.sleep(0.01)
    peers.receiver.poll(4)
    wire = device_wire(peers)
    assert wire._control is not None
    said: list[Word] = []
    wire._control.say = lambda word: said.append(word)  # type: ignore[method-assign]
    peers.expect(2, [[1], []])
    transfer = peers.begin(2, [1, 0])
    peers.push(transfer, 0, 0, 1)
    peers.sender.poll(4)
    assert said == []
    assert peers.receiver.restless
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 2 in peers.acknowledged())


def test_a_device_that_refuses_leaves_no_block_pinned(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link breaks, and with it ends what it was told to read and never did."""
    peers = ends()
    peers.send(1, [[1], []], [[1], []])
    peers.run_until(lambda: peers.acknowledged() == [1])
    gather = device_wire(peers)._gather

    def refuse(*arguments: object) -> int:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gather._mover, "move", refuse)
    peers.expect(2, [[2, 3], []])
    transfer = peers.begin(2, [2, 0])
    peers.push_all(transfer, [[2, 3]])
    peers.run_until(lambda: 2 in peers.failures())
    assert "the device refuses: out of memory" in peers.failures()[2].message
    assert not peers.source.pins
    assert peers.sender.pinned_blocks == 0


class Later:
    """The end of a step that is under way."""

    come = False

    def ended(self) -> bool:
        return self.come


def begun_before_its_step_ends(peers: Peers, later: Later) -> Transfer:
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
    peers, later = ends(sender=on_device), Later()
    transfer = begun_before_its_step_ends(peers, later)
    assert any(isinstance(event, Arrived) for event in peers.received) is on_device, "announced before"
    assert peers.receiver.counters.bytes_received == 0
    peers.source.groups[1][5:7] = 77  # only now
    later.come = True
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: peers.acknowledged() == [1])
    assert (peers.sink.groups[1][3:5] == 77).all()
    peers.check_ledger()


def test_given_up_before_its_step_ends(ends: Ends) -> None:
    """Its blocks may be computed all the same: nothing of them is written there, and all credits come
    home."""
    peers, later = ends(), Later()
    before = peers.sink.groups[1].copy()
    transfer = begun_before_its_step_ends(peers, later)
    transfer.withdraw(WithdrawReason.ABORTED)
    peers.run_until(lambda: peers.receiver.expected_transfers == 0)
    assert peers.source.pins, "the device has not read them"
    later.come = True
    peers.run_until(lambda: not peers.source.pins and link_of(peers).audit().credited_pieces == 0)
    assert (peers.sink.groups[1] == before).all()
    peers.check_ledger()


def test_a_link_that_breaks_before_its_step_ends(ends: Ends) -> None:
    """Its sender's device cannot be stopped, so whoever breaks it waits for the step, and the receiver for
    the sender."""
    peers, later = ends(), Later()
    begun_before_its_step_ends(peers, later)
    device_wire(peers)._break(BatonError(ErrorKind.UNAVAILABLE, "cut"))
    ending = threading.Timer(0.05, setattr, (later, "come", True))
    ending.start()
    peers.run_until(lambda: 1 in peers.failures() and 1 in peers.withdrawn())
    ending.join()
    assert not peers.source.pins
    before = peers.sink.groups[1].copy()  # what landed while its blocks were reserved
    peers.run_until(lambda: windows(ends) == [True])
    assert (peers.sink.groups[1] == before).all()
    assert sent(peers, 2) == "grpc", "the next way"
