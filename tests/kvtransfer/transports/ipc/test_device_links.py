"""Links between devices, and what becomes of those that cannot be."""

from __future__ import annotations

import dataclasses
import time

import pytest

from baton.base.errors import ErrorKind
from kvtransfer.device.scatter import DeviceScatter
from kvtransfer.protocol.checksum import PieceChecksum
from kvtransfer.protocol.frames import Piece, WithdrawReason
from kvtransfer.transports.ipc.control import ControlByte
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.device_ends import Ends, device_wire, sent, streams_of, windows
from tests.kvtransfer.support.fake_device import FakeDevice
from tests.kvtransfer.support.peers import Shape


def test_several_blocks_are_one_piece(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that follow each other at the receiver are one piece, wherever they lie here and there."""
    announced: list[Piece] = []
    announce = IpcDeviceSenderWire.announce

    def noted(wire: IpcDeviceSenderWire, piece: Piece) -> None:
        announced.append(piece)
        announce(wire, piece)

    monkeypatch.setattr(IpcDeviceSenderWire, "announce", noted)
    peers = ends()
    places = [[], [30, 2, 17, 5, 9, 40, 11]]
    peers.send(1, [[], [3, 1, 60, 8, 20, 33, 7]], places)
    peers.run_until(lambda: peers.acknowledged() == [1])
    assert peers.equal([[], [3, 1, 60, 8, 20, 33, 7]], places)
    assert peers.receiver.counters.blocks_received == [0, 7]
    assert len(announced) == 2  # a small one first, since nothing was on the wire
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


def test_a_sender_whose_device_cannot_open_the_window_falls_back_to_grpc(ends: Ends) -> None:
    """The device does not see the receiver's GPU, and so has to try."""
    peers = ends()
    assert isinstance(ends.rig.sender, FakeDevice)
    ends.rig.sender.blind = True
    assert sent(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    peers.run_until(lambda: windows(ends) == [True])


def test_a_receiver_without_memory_for_a_window_falls_back_to_grpc(ends: Ends) -> None:
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
    assert wire.control is not None
    wire.control.end()  # the socket's end proves nothing about a process that lives
    peers.run_until(lambda: bool(peers.receiver.links and peers.receiver.links[0].quarantined_pieces))
    assert windows(ends) == [False]
    peers.run_until(lambda: not peers.sender.links)


def test_enqueued_device_work_is_done_before_its_link_is_fenced(ends: Ends) -> None:
    """Later bytes would be written into reused memory."""
    peers = ends()
    peers.expect(1, [list(range(20)), []])
    transfer = peers.begin(1, [20, 0])
    peers.push_all(transfer, [list(range(20)), []])
    peers.run_until(lambda: bool(peers.sender.links) and peers.sender.links[0].credited_pieces > 0)
    wire = device_wire(peers)
    assert not ends.rig.pump.idle()
    wire.close()
    assert not any(stream.left for stream in streams_of(ends.rig.sender))
    peers.run_until(lambda: windows(ends) == [True])
    before = ends.rig.receiver.allocated[0].tensor.clone()  # type: ignore[attr-defined]
    for _ in range(200):
        ends.rig.advance()
    assert bool((ends.rig.receiver.allocated[0].tensor == before).all())  # type: ignore[attr-defined]


def test_a_sleeping_receiver_is_woken_before_the_bytes_and_polls_until_they_arrive(
    ends: Ends,
) -> None:
    peers = ends()
    sent(peers, 1)
    wire = device_wire(peers)
    assert wire.control is not None

    time.sleep(0.01)
    assert (
        not peers.receiver.busy_poll
    )  # it has polled in vain for a while, and needs a doorbell from here on
    rung: list[ControlByte] = []
    wire.control.send = rung.append  # type: ignore[method-assign,assignment]
    before = peers.receiver.counters.bytes_received
    ends.rig.pump.stands = True
    peers.expect(2, [[1], []])
    transfer = peers.begin(2, [1, 0])
    peers.push(transfer, 0, 0, 1)
    peers.sender.poll(4)
    assert rung == [ControlByte.DOORBELL]
    peers.receiver.poll(4)  # the piece is announced
    time.sleep(0.01)
    assert peers.receiver.busy_poll
    assert peers.receiver.counters.bytes_received == before
    ends.rig.pump.stands = False
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 2 in peers.acknowledged())
    peers.check_ledger()


def test_a_receiver_that_expects_a_device_polls_soon(ends: Ends) -> None:
    peers = ends()
    peers.expect(1, [[1], []])
    assert not peers.receiver.poll_soon  # over which transport is not known yet
    transfer = peers.begin(1, [1, 0])
    peers.push(transfer, 0, 0, 1)
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 1 in peers.acknowledged())
    assert not peers.receiver.poll_soon
    peers.expect(2, [[1], []])
    assert peers.receiver.poll_soon
    peers.forget(2)


def test_a_device_is_kept_warm_while_a_transfer_is_expected(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = ends()
    sent(peers, 1)
    kept: list[DeviceScatter] = []
    monkeypatch.setattr(DeviceScatter, "keep_warm", lambda scatter: kept.append(scatter))
    peers.receiver.poll(4)
    assert kept == []
    peers.expect(2, [[1], []])
    peers.receiver.poll(4)
    assert len(kept) == 1
    peers.forget(2)
    peers.receiver.poll(4)
    assert len(kept) == 1


@pytest.mark.parametrize("link_peers", ["ipc-fake"], indirect=True)
def test_a_piece_cut_differently_breaks_the_link_when_it_has_arrived(link_peers: LinkPeers) -> None:
    peers = link_peers(Shape(block_bytes=(8192,), window_pieces=4))

    def shorten(piece: Piece, payload: bytes) -> tuple[Piece, bytes]:
        data = payload[:2048]
        place = piece.transfer, piece.group, piece.ordinal, piece.offset
        checksum = PieceChecksum(4096).of(memoryview(data), *place)
        return dataclasses.replace(piece, length=len(data), checksum=checksum), data

    link_peers.connector.tamper = shorten
    # No commit: one that is read before a piece has landed is refused, and the link goes on until then.
    peers.expect(1, [[1]])
    peers.push_all(peers.begin(1, [1]), [[1]])
    peers.run_until(lambda: 1 in peers.withdrawn() and 1 in peers.failures())
    withdrawn = peers.withdrawn()[1]
    assert withdrawn.reason is WithdrawReason.LINK_LOST
    assert withdrawn.message.startswith(
        "malformed frame: blocks are not cut into such pieces: Piece(transfer=1, "
    )
    assert withdrawn.message in peers.failures()[1].message
    assert peers.receiver.counters.links_broken == 1


def test_an_end_that_does_not_sleep_gets_no_doorbell(ends: Ends) -> None:
    """However long ago the last frame was: a loop that polls and does not sleep needs none."""
    peers = ends()
    sent(peers, 1)
    time.sleep(0.01)
    peers.receiver.poll(4)
    wire = device_wire(peers)
    assert wire.control is not None
    rung: list[ControlByte] = []
    wire.control.send = rung.append  # type: ignore[method-assign,assignment]
    peers.expect(2, [[1], []])
    transfer = peers.begin(2, [1, 0])
    peers.push(transfer, 0, 0, 1)
    peers.sender.poll(4)
    assert rung == []
    assert peers.receiver.busy_poll
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: 2 in peers.acknowledged())


def test_a_device_that_fails_leaves_no_block_pinned(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link breaks, and with it the reads that were never enqueued."""
    peers = ends()
    peers.send(1, [[1], []], [[1], []])
    peers.run_until(lambda: peers.acknowledged() == [1])

    def refuse(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    for stream in streams_of(ends.rig.sender):
        monkeypatch.setattr(stream, "copy_batch", refuse)
    peers.expect(2, [[2, 3], []])
    transfer = peers.begin(2, [2, 0])
    peers.push_all(transfer, [[2, 3]])
    peers.run_until(lambda: 2 in peers.failures())
    assert "the device failed: out of memory" in peers.failures()[2].message
    assert not peers.source.pins
    assert peers.sender.pinned_blocks == 0
