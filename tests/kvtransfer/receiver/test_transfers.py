"""Unexpected frames at a receiver, and the answers to their sender."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.link.staging import Owner
from kvtransfer.protocol import frames
from kvtransfer.protocol.frames import (
    Commit,
    Credit,
    FrameError,
    Metadata,
    Refused,
    Stop,
    StopAck,
    StopReason,
    Withdraw,
    WithdrawReason,
)
from kvtransfer.receiver.events import Committed, MetadataReceived, TransferStarted, Withdrawn
from tests.kvtransfer.support.receiving_end import TIMEOUT_S, WINDOW, LinkRig, ReceivingEnd

UNKNOWN = (ErrorKind.UNAVAILABLE, "the receiver does not expect this transfer")


@pytest.fixture
def end() -> ReceivingEnd:
    return ReceivingEnd()


@pytest.fixture
def rig() -> LinkRig:
    return LinkRig("prefill-0")


def complaint(error: pytest.ExceptionInfo[BatonError]) -> tuple[ErrorKind, str]:
    return error.value.kind, error.value.message


def test_a_transfer_from_its_ticket_to_its_answer(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [1, 1])
    assert (end.take_events(), len(end.transfers)) == ([], 1)
    places = [(0, 0, 0), (0, 0, 8), (1, 0, 0)]
    data = [b"aaaaaaaa", b"bbbbbbbb", b"cccc"]
    for staging, (place, piece) in enumerate(zip(places, data, strict=True)):
        end.send(rig, (1, *place), piece, staging)
    assert end.scattered == [(1, *place, piece) for place, piece in zip(places, data, strict=True)]
    assert (end.counters.bytes_received, end.counters.blocks_received) == (20, [1, 1])
    assert rig.take_sent() == [Credit((0, 1))], "credits are returned in batches"
    assert rig.staging.count(Owner.SENDER) == WINDOW
    assert not end.transfers.has_commits
    record = end.commit(rig, 1, [1, 1])
    assert end.transfers.has_commits
    assert end.take_events() == [TransferStarted(1), Committed(1, record)]
    assert not end.transfers.has_commits
    assert rig.link.transfers == set()
    assert rig.take_sent() == []
    end.transfers.acknowledge(1)
    assert rig.take_sent() == [frames.CommitAck(1, ANY), Credit((2,))]
    assert (len(end.transfers), end.counters.dropped_unknown) == (0, 0)


def test_metadata_is_completed_by_the_first_token_of_its_commit_alone(
    end: ReceivingEnd, rig: LinkRig
) -> None:
    end.transfers.expect(1, [0, 0], [])
    ahead = end.record(1, [0, 0])
    ahead.prompt_length = 3
    end.handle(rig, Metadata(1, ahead.SerializeToString()))
    assert end.take_events() == [MetadataReceived(1, ahead)]
    found = CommitRecord(first_token_id=7, first_number=5, block_counts=[0, 0], prompt_length=9)
    found.first_logprobs.logprob = -1.5
    end.handle(rig, Commit(1, found.SerializeToString()))
    ahead.first_token_id, ahead.first_number = 7, 5
    ahead.first_logprobs.logprob = -1.5
    ahead.block_counts[:] = [0, 0]
    assert end.take_events() == [Committed(1, ahead)]


def test_a_transfer_is_expected_once(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    with pytest.raises(BatonError) as error:
        end.transfers.expect(1, [0, 0], [])
    assert complaint(error) == (ErrorKind.CONFLICT, "transfer 1 was expected before")
    end.commit(rig, 1, [0, 0])
    end.transfers.acknowledge(1)
    with pytest.raises(BatonError) as error:
        end.transfers.expect(1, [0, 0], [])
    assert complaint(error) == (ErrorKind.CONFLICT, "transfer 1 was expected before")


@pytest.mark.parametrize(
    ("counts", "held", "reported"),
    [([1], [0], "1 and 1"), ([1, 1], [1], "2 and 1"), ([1], [0, 0], "1 and 2")],
)
def test_every_cache_group_has_a_count(
    end: ReceivingEnd, counts: list[int], held: list[int], reported: str
) -> None:
    with pytest.raises(ValueError) as error:
        end.transfers.expect(1, counts, held)
    assert str(error.value) == f"{reported} block counts for 2 cache groups"


def test_only_a_committed_transfer_is_answered(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    for transfer in (1, 2):
        with pytest.raises(BatonError) as error:
            end.transfers.acknowledge(transfer)
        assert complaint(error) == (ErrorKind.NOT_FOUND, f"transfer {transfer} waits for no answer")
    assert (rig.take_sent(), len(end.transfers)) == ([], 1)


# -- unexpected transfers ----------------------------------------------------------------------


def test_records_and_commits_of_unknown_transfers_are_refused(end: ReceivingEnd, rig: LinkRig) -> None:
    for count in (1, 2):
        end.handle(rig, Metadata(count, b""))
        end.handle(rig, Commit(count, b""))
        assert rig.take_sent() == [Refused(count, *UNKNOWN)] * 2
        assert end.counters.dropped_unknown == 2 * count
    assert end.take_events() == []


def test_frames_over_another_link_change_nothing(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [1, 1])
    other = LinkRig("prefill-1")
    end.handle(other, Metadata(1, end.record(1, [1, 1]).SerializeToString()))
    end.commit(other, 1, [1, 1])
    assert other.take_sent() == [Refused(1, *UNKNOWN)] * 2
    end.send(other, (1, 1, 0, 0), b"cccc")
    end.handle(other, Withdraw(1, WithdrawReason.ABORTED))
    assert (other.take_sent(), rig.take_sent()) == ([], [])
    assert (end.take_events(), end.scattered, end.counters.dropped_unknown) == ([], [], 4)
    assert other.staging.count(Owner.SENDER) == WINDOW
    assert rig.link.transfers == {1}


def test_a_repeated_commit_gets_the_same_answer(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    end.commit(rig, 1, [0, 0])
    end.commit(rig, 1, [0, 0])  # not answered yet
    assert (rig.take_sent(), end.counters.dropped_unknown) == ([], 1)
    end.transfers.acknowledge(1)
    end.commit(rig, 1, [0, 0])
    answer, repeated = rig.take_sent()
    assert answer == repeated == frames.CommitAck(1, ANY)
    assert [type(event) for event in end.take_events()] == [Committed]


def test_answers_are_kept_for_the_last_commits_which_may_come_again(end: ReceivingEnd, rig: LinkRig) -> None:
    most = 4096
    for transfer in range(1, most + 2):
        end.bind(rig, transfer, [0, 0])
        end.commit(rig, transfer, [0, 0])
        end.transfers.acknowledge(transfer)
    rig.take_sent()
    for transfer in (2, most + 1, 1):
        end.commit(rig, transfer, [0, 0])
    refused = Refused(1, *UNKNOWN)
    assert rig.take_sent() == [frames.CommitAck(2, ANY), frames.CommitAck(most + 1, ANY), refused]


def test_a_sender_is_stopped_once_and_in_time(end: ReceivingEnd, rig: LinkRig) -> None:
    for staging in (0, 1):
        end.send(rig, (1, 1, staging, 0), b"cccc", staging)
    assert rig.take_sent() == [Stop(1, StopReason.UNKNOWN), Credit((0, 1))]
    assert end.counters.dropped_unknown == 2
    assert rig.link.overdue(end.clock.now + TIMEOUT_S - 0.1) is None
    assert rig.link.overdue(end.clock.now + TIMEOUT_S) == "the sender did not acknowledge a stop"
    end.handle(rig, StopAck(1))
    assert (rig.link.overdue(end.clock.now + TIMEOUT_S), end.counters.dropped_unknown) == (None, 2)
    end.handle(rig, StopAck(1))
    assert end.counters.dropped_unknown == 3


def test_bytes_before_their_ticket_are_dropped_and_their_sender_stopped(
    end: ReceivingEnd, rig: LinkRig
) -> None:
    end.transfers.expect(1, [0, 1], [])
    end.send(rig, (1, 1, 0, 0), b"cccc")
    assert rig.take_sent() == [Stop(1, StopReason.REFUSED)]
    assert (end.take_events(), end.scattered, end.counters.dropped_unknown) == ([], [], 1)
    assert len(end.transfers) == 1


def test_bytes_after_the_commit_are_dropped(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    end.commit(rig, 1, [0, 0])
    end.send(rig, (1, 1, 0, 0), b"cccc")
    end.transfers.acknowledge(1)
    rig.take_sent()
    end.send(rig, (1, 1, 0, 0), b"cccc")
    assert (rig.take_sent(), end.scattered, end.counters.dropped_unknown) == ([], [], 2)


def test_a_second_record_changes_nothing(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 1])
    for count in (1, 2):
        second = end.record(1, [0, 1])
        second.prompt_length = 3
        end.handle(rig, Metadata(1, second.SerializeToString()))
        assert (end.take_events(), rig.take_sent(), end.counters.dropped_unknown) == ([], [], count)


# -- bytes ----------------------------------------------------------------------------------------


def test_every_wrong_byte_is_counted_and_ends_its_transfer_alone(end: ReceivingEnd, rig: LinkRig) -> None:
    for transfer in (1, 2, 3):
        end.bind(rig, transfer, [0, 1])
    for transfer in (1, 2):
        end.send(rig, (transfer, 1, 0, 0), b"cccc", wrong=True)
        text = f"checksum mismatch in a piece of transfer {transfer}"
        assert end.take_events() == [
            TransferStarted(transfer), Withdrawn(transfer, WithdrawReason.CORRUPTED, text)
        ]  # fmt: skip
        refused = Refused(transfer, ErrorKind.UNAVAILABLE, text)
        assert rig.take_sent()[:2] == [refused, Stop(transfer, StopReason.REFUSED)]
        assert end.counters.checksum_failures == transfer
        assert rig.staging.count(Owner.SENDER) == WINDOW
        end.commit(rig, transfer, [0, 1])
        assert rig.take_sent() == [refused], "its commit has the same answer"
    assert (rig.link.transfers, len(end.transfers), end.scattered) == ({3}, 1, [])


def test_pieces_cut_differently_break_the_link(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [1, 0])
    with pytest.raises(FrameError) as error:
        end.send(rig, (1, 0, 0, 4), b"aaaaaaaa")
    piece = end.piece(rig, (1, 0, 0, 4), b"aaaaaaaa")
    assert complaint(error) == (
        ErrorKind.INVALID,
        f"malformed frame: blocks are not cut into such pieces: {piece}",
    )
    assert rig.staging.count(Owner.SENDER) == WINDOW
    assert end.scattered == []


@pytest.mark.parametrize(("held", "ordinal"), [(0, 3), (0, 9), (1, 0)])
def test_a_block_that_is_not_expected_is_refused(
    end: ReceivingEnd, rig: LinkRig, held: int, ordinal: int
) -> None:
    end.bind(rig, 1, [0, 3], [0, held])
    piece = end.send(rig, (1, 1, ordinal, 0), b"cccc")
    text = f"transfer 1 has no such piece: {piece}"
    assert end.take_events() == [TransferStarted(1), Withdrawn(1, WithdrawReason.REFUSED, text)]
    assert rig.take_sent() == [Refused(1, ErrorKind.INTERNAL, text), Stop(1, StopReason.REFUSED)]
    assert end.scattered == []


def test_a_piece_is_accepted_once(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [2, 0])
    for _ in range(3):
        end.send(rig, (1, 0, 1, 8), b"bbbbbbbb")
    assert end.scattered == [(1, 0, 1, 8, b"bbbbbbbb")]
    counters = end.counters
    assert (counters.dropped_unknown, counters.bytes_received, counters.blocks_received) == (2, 8, [0, 0])
    for offset, ordinal in ((0, 1), (8, 0), (0, 0)):
        end.send(rig, (1, 0, ordinal, offset), b"bbbbbbbb")
    assert (counters.dropped_unknown, counters.bytes_received, counters.blocks_received) == (2, 32, [2, 0])


def test_blocks_after_resident_ones(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [3, 2], [2, 1])
    for place in ((0, 2, 0), (0, 2, 8)):
        end.send(rig, (1, *place), b"aaaaaaaa")
    end.send(rig, (1, 1, 1, 0), b"cccc")
    assert end.counters.blocks_received == [1, 1]
    record = end.commit(rig, 1, [1, 1])
    assert end.take_events() == [TransferStarted(1), Committed(1, record)]
