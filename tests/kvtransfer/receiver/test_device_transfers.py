"""Operations that a receiver enqueues on the device that moves pieces, and its handling of their outcomes."""

from __future__ import annotations

import pytest

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.device.scatter import MovedPiece, Outcome
from kvtransfer.link.staging import Owner
from kvtransfer.protocol.frames import Commit, Credit, FrameError, Piece, Refused, Stop, StopReason, Withdraw
from kvtransfer.protocol.frames import WithdrawReason as Reason
from kvtransfer.receiver.events import CommitPending, Committed, TransferStarted, Withdrawn
from tests.kvtransfer.support.receiving_end import WINDOW, LinkRig, ReceivingEnd
from tests.support.events import FakeEvent


@pytest.fixture
def end() -> ReceivingEnd:
    return ReceivingEnd()


@pytest.fixture
def rig() -> LinkRig:
    return LinkRig("prefill-0", on_device=True)


def finish(end: ReceivingEnd, rig: LinkRig, *ends: MovedPiece) -> None:
    rig.scatter.ends += ends
    end.transfers.collect_moved(rig.link)


def expect_two_blocks(end: ReceivingEnd, rig: LinkRig) -> tuple[Piece, Piece]:
    """Transfer 1, of two blocks and as many pieces of them; a device moves both."""
    end.bind(rig, 1, [0, 2])
    pieces = tuple(end.send(rig, (1, 1, n, 0), b"cccc", n) for n in range(2))
    assert end.take_events() == [TransferStarted(1)]
    rig.scatter.take_calls()
    return pieces[0], pieces[1]


def test_a_piece_is_moved_as_soon_as_it_is_announced(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [1, 3])
    never = FakeEvent()
    two = end.piece(rig, (1, 1, 1, 0), b"ccccdddd", 5)
    rig.wire.arrivals[two] = never
    assert end.send(rig, (1, 1, 1, 0), b"ccccdddd", 5) == two
    halves = [end.send(rig, (1, 0, 0, offset), b"aaaaaaaa", offset // 8) for offset in (0, 8)]
    assert rig.scatter.take_calls() == [
        ("begin", two, 2, 2, never),
        ("begin", halves[0], 1, 0, None),
        ("begin", halves[1], 1, 1, None),
    ]
    assert end.counters.bytes_received == 0, "nothing has been moved yet"
    assert rig.take_sent() == []
    finish(end, rig, MovedPiece(two, 2, Outcome.VALID), MovedPiece(halves[0], 0, Outcome.VALID))
    assert (end.counters.bytes_received, end.counters.blocks_received) == (16, [0, 2])
    assert rig.staging.count(Owner.RECEIVER) == 1
    finish(end, rig, MovedPiece(halves[1], 1, Outcome.VALID))
    assert (end.counters.bytes_received, end.counters.blocks_received) == (24, [1, 2])
    assert rig.staging.count(Owner.SENDER) == WINDOW
    rig.link.flush()
    assert rig.take_sent() == [Credit((5, 0, 1))]
    assert end.counters.dropped_unknown == 0
    assert end.scattered == []


def test_a_commit_waits_for_the_last_of_its_pieces(end: ReceivingEnd, rig: LinkRig) -> None:
    first, second = expect_two_blocks(end, rig)
    assert not end.transfers.all_commits_received(rig.link)
    record = end.commit(rig, 1, [0, 2])
    assert (end.take_events(), end.transfers.has_commits) == ([CommitPending(1, record)], False)
    assert end.transfers.all_commits_received(rig.link)
    end.bind(rig, 2, [0, 0])
    assert not end.transfers.all_commits_received(rig.link)
    end.commit(rig, 2, [0, 0])
    end.take_events()
    finish(end, rig, MovedPiece(first, 1, Outcome.VALID))
    assert end.take_events() == []
    finish(end, rig, MovedPiece(second, 1, Outcome.VALID))
    assert end.take_events() == [Committed(1, record)]
    assert rig.link.transfers == set()
    assert (end.counters.bytes_received, end.counters.blocks_received) == (8, [0, 2])
    assert not end.transfers.all_commits_received(rig.link)


def test_frames_after_a_commit_that_waits_are_dropped(end: ReceivingEnd, rig: LinkRig) -> None:
    first, second = expect_two_blocks(end, rig)
    record = end.commit(rig, 1, [0, 2])
    end.commit(rig, 1, [0, 2])
    late = end.send(rig, (1, 1, 1, 0), b"cccc", 4)
    assert end.take_events() == [CommitPending(1, record)]
    assert (rig.scatter.take_calls(), end.counters.dropped_unknown) == ([("drop", late)], 2)
    ends = (
        MovedPiece(first, 1, Outcome.VALID),
        MovedPiece(second, 1, Outcome.VALID),
        MovedPiece(late, 0, Outcome.DROPPED),
    )
    finish(end, rig, *ends)
    assert end.take_events() == [Committed(1, record)]
    assert rig.take_sent() == []
    assert rig.staging.count(Owner.SENDER) == WINDOW


def test_what_is_dropped_touches_no_transfer(end: ReceivingEnd, rig: LinkRig) -> None:
    """Neither a repeated nor an unexpected piece holds up the commit."""
    first, second = expect_two_blocks(end, rig)
    again = [end.send(rig, (1, 1, 1, 0), b"cccc", 2 + n) for n in range(2)]
    unknown = end.send(rig, (8, 1, 0, 0), b"cccc", 4)
    assert rig.scatter.take_calls() == [("drop", piece) for piece in (*again, unknown)]
    assert end.counters.dropped_unknown == 3
    assert rig.take_sent() == [Stop(8, StopReason.UNKNOWN)]
    record = end.commit(rig, 1, [0, 2])
    finish(end, rig, *(MovedPiece(piece, 0, Outcome.DROPPED) for piece in (*again, unknown)))
    assert end.take_events() == [CommitPending(1, record)]
    assert end.counters.bytes_received == 0
    finish(end, rig, MovedPiece(first, 1, Outcome.VALID), MovedPiece(second, 1, Outcome.VALID))
    assert end.take_events() == [Committed(1, record)]


def test_a_corrupt_piece_ends_its_transfer(end: ReceivingEnd, rig: LinkRig) -> None:
    first, second = expect_two_blocks(end, rig)
    end.commit(rig, 1, [0, 2])
    end.take_events()
    finish(end, rig, MovedPiece(first, 1, Outcome.CORRUPT))
    text = "checksum mismatch in a piece of transfer 1"
    assert end.take_events() == [Withdrawn(1, Reason.CORRUPTED, text)]
    assert rig.take_sent() == [Refused(1, ErrorKind.UNAVAILABLE, text), Stop(1, StopReason.REFUSED)]
    assert ("cancel", 1) in rig.scatter.take_calls()
    finish(end, rig, MovedPiece(second, 0, Outcome.DROPPED))
    assert (end.counters.checksum_failures, end.counters.bytes_received) == (1, 0)
    assert (end.take_events(), len(end.transfers)) == ([], 0)
    assert rig.staging.count(Owner.SENDER) == WINDOW


def test_a_corrupt_piece_of_an_ended_transfer_is_ignored(end: ReceivingEnd, rig: LinkRig) -> None:
    first, second = expect_two_blocks(end, rig)
    end.transfers.forget(1)
    assert rig.scatter.take_calls() == [("cancel", 1)]
    rig.take_sent()
    finish(end, rig, MovedPiece(first, 1, Outcome.CORRUPT), MovedPiece(second, 1, Outcome.CORRUPT))
    assert (end.take_events(), rig.take_sent()) == ([], [])
    assert end.counters.checksum_failures == 0


def test_a_piece_over_another_link_does_not_end_a_transfer(end: ReceivingEnd, rig: LinkRig) -> None:
    first, _ = expect_two_blocks(end, rig)
    other = LinkRig("prefill-1", on_device=True)
    stray = end.send(other, (1, 1, 0, 0), b"cccc", 0)
    for outcome in (Outcome.CORRUPT, Outcome.VALID, Outcome.IN_STAGING):
        if other.staging.count(Owner.RECEIVER) == 0:
            other.staging.take(stray)
        finish(end, other, MovedPiece(stray, 0, outcome))
    record = end.commit(rig, 1, [0, 2])
    finish(end, rig, MovedPiece(first, 1, Outcome.VALID))
    assert end.take_events() == [CommitPending(1, record)], "the other link's pieces are not among its own"
    assert end.counters.checksum_failures == 0


# -- pieces that are verified in staging --------------------------------------------------------


def test_a_piece_of_no_expected_block_stays_in_staging_and_is_refused(
    end: ReceivingEnd, rig: LinkRig
) -> None:
    end.bind(rig, 1, [0, 1])
    piece = end.send(rig, (1, 1, 1, 0), b"cccc", 3)
    assert rig.scatter.take_calls() == [("keep_in_staging", piece)]
    rig.wire.checksums[piece] = piece.checksum
    finish(end, rig, MovedPiece(piece, 0, Outcome.IN_STAGING))
    assert rig.scatter.take_calls() == [("start", 7)], "nothing of it is under way, so nothing is given up"
    text = f"transfer 1 has no such piece: {piece}"
    assert end.take_events() == [TransferStarted(1), Withdrawn(1, Reason.REFUSED, text)]
    assert rig.take_sent() == [Refused(1, ErrorKind.INTERNAL, text), Stop(1, StopReason.REFUSED)]
    assert rig.staging.count(Owner.SENDER) == WINDOW


def test_a_piece_in_staging_is_verified_by_its_senders_checksum(end: ReceivingEnd, rig: LinkRig) -> None:
    """The piece's announcement may have been corrupted, and proves nothing about its bytes."""
    end.bind(rig, 1, [0, 1])
    piece = end.send(rig, (1, 1, 1, 0), b"cccc", 3)
    rig.wire.checksums[piece] = piece.checksum ^ 1
    finish(end, rig, MovedPiece(piece, 0, Outcome.IN_STAGING))
    assert end.counters.checksum_failures == 1
    assert [type(event) for event in end.take_events()] == [TransferStarted, Withdrawn]


def test_a_commit_waits_for_pieces_in_staging_too(end: ReceivingEnd, rig: LinkRig) -> None:
    """And is not accepted when a piece in staging is not of the transfer."""
    first, second = expect_two_blocks(end, rig)
    held = [end.send(rig, (1, 1, 2 + n, 0), b"cccc", 2 + n) for n in range(2)]
    assert rig.scatter.take_calls() == [("keep_in_staging", piece) for piece in held]
    record = end.commit(rig, 1, [0, 2])
    finish(end, rig, MovedPiece(first, 1, Outcome.VALID), MovedPiece(second, 1, Outcome.VALID))
    assert end.take_events() == [CommitPending(1, record)]
    rig.wire.checksums[held[0]] = held[0].checksum
    finish(end, rig, MovedPiece(held[0], 0, Outcome.IN_STAGING))
    assert [type(event) for event in end.take_events()] == [Withdrawn]
    assert len(end.transfers) == 0


def test_every_moved_piece_is_collected_before_a_link_breaks(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 2])
    bad = end.send(rig, (1, 1, 0, 1), b"ccc", 0)
    good = end.send(rig, (1, 1, 1, 0), b"cccc", 1)
    rig.wire.checksums[bad] = bad.checksum
    with pytest.raises(FrameError) as error:
        finish(end, rig, MovedPiece(bad, 0, Outcome.IN_STAGING), MovedPiece(good, 1, Outcome.VALID))
    assert error.value.message == f"malformed frame: blocks are not cut into such pieces: {bad}"
    assert (end.counters.bytes_received, rig.staging.count(Owner.SENDER)) == (4, WINDOW)


# -- endings while a device has its pieces --------------------------------------------------------


def test_a_withdrawn_transfer_is_written_no_more(end: ReceivingEnd, rig: LinkRig) -> None:
    expect_two_blocks(end, rig)
    end.handle(rig, Withdraw(1, Reason.ABORTED))
    assert rig.scatter.take_calls() == [("cancel", 1)]
    assert end.take_events() == [Withdrawn(1, Reason.ABORTED, "the sender withdrew")]


def test_an_ended_transfer_waits_for_no_device(end: ReceivingEnd, rig: LinkRig) -> None:
    pieces = expect_two_blocks(end, rig)
    finish(end, rig, *(MovedPiece(piece, 1, Outcome.VALID) for piece in pieces))
    rig.scatter.take_calls()
    end.transfers.forget(1)
    assert rig.scatter.take_calls() == []


def test_a_transfer_on_the_host_cancels_nothing(end: ReceivingEnd) -> None:
    host = LinkRig("prefill-1")
    end.bind(host, 1, [0, 1])
    end.send(host, (1, 1, 0, 0), b"cccc")
    end.transfers.forget(1)
    assert host.scatter.take_calls() == []


def test_pieces_arrived_before_a_break_count_and_others_are_dropped(end: ReceivingEnd, rig: LinkRig) -> None:
    pieces = expect_two_blocks(end, rig)
    record = end.commit(rig, 1, [0, 2])
    end.bind(rig, 2, [0, 1])
    lost = end.send(rig, (2, 1, 0, 0), b"cccc", 4)
    end.take_events()
    rig.scatter.take_calls()
    rig.scatter.lost = [lost]
    rig.scatter.ends = [MovedPiece(piece, 1, Outcome.VALID) for piece in pieces]
    end.transfers.link_broke(rig.link, BatonError(ErrorKind.UNAVAILABLE, "cut"))
    assert rig.scatter.take_calls()[:2] == [("start", 7), ("break_off",)]
    assert end.take_events() == [Committed(1, record), Withdrawn(2, Reason.LINK_LOST, "cut")]
    assert rig.staging.count(Owner.SENDER) == WINDOW
    assert len(end.transfers) == 1


def test_a_link_breaks_once(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 2])
    bad = end.send(rig, (1, 1, 0, 1), b"ccc", 0)
    rig.wire.checksums[bad] = bad.checksum
    rig.scatter.ends = [MovedPiece(bad, 0, Outcome.IN_STAGING)]
    end.take_events()
    end.transfers.link_broke(rig.link, BatonError(ErrorKind.UNAVAILABLE, "cut"))
    assert end.take_events() == [Withdrawn(1, Reason.LINK_LOST, "cut")]
    end.handle(rig, Commit(1, b""))
    assert len(end.transfers) == 0
