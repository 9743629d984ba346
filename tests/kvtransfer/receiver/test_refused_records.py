"""Answers to invalid metadata and commits, and what becomes of their transfers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.base.errors import ErrorKind
from baton.v1.decode_pb2 import TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.protocol.frames import Commit, Metadata, Refused, Stop, StopReason, WithdrawReason
from kvtransfer.receiver.events import Committed, ReceiverEvent, Withdrawn
from tests.kvtransfer.support.peers import identity
from tests.kvtransfer.support.receiving_end import LinkRig, ReceivingEnd

Change = Callable[[TicketBody], None]
UNREADABLE = (ErrorKind.INTERNAL, "the commit record cannot be parsed")
ANOTHER_TRANSFER = (ErrorKind.FORBIDDEN, "the ticket was issued for another transfer")
ANOTHER_ATTEMPT = (ErrorKind.FORBIDDEN, "the ticket was issued for another attempt")
UNSIGNED = (ErrorKind.FORBIDDEN, "the ticket was not signed by this receiver")


@pytest.fixture
def end() -> ReceivingEnd:
    return ReceivingEnd()


@pytest.fixture
def rig() -> LinkRig:
    return LinkRig("prefill-0")


def still_free(end: ReceivingEnd, rig: LinkRig) -> bool:
    """True if transfer 1 waits for its right ticket as if nothing had come."""
    assert end.take_events() == []
    assert rig.link.transfers == set()
    end.handle(rig, Metadata(1, end.record(1, [0, 1]).SerializeToString()))
    return rig.link.transfers == {1} and rig.take_sent() == []


def other_transfer(body: TicketBody) -> None:
    body.transfer_id = 2


def other_start(body: TicketBody) -> None:
    body.issuer.CopyFrom(identity("receiver", 2))


@pytest.mark.parametrize("change", [other_transfer, other_start])
def test_a_ticket_of_something_else_binds_nothing(end: ReceivingEnd, rig: LinkRig, change: Change) -> None:
    end.transfers.expect(1, [0, 1], [])
    body = end.ticket(1, [0, 1])
    change(body)
    end.handle(rig, Metadata(1, end.record(1, [0, 1], body=body).SerializeToString()))
    assert rig.take_sent() == [Refused(1, *ANOTHER_TRANSFER)]
    assert still_free(end, rig)


def test_a_record_of_another_attempt_binds_nothing(end: ReceivingEnd, rig: LinkRig) -> None:
    end.transfers.expect(1, [0, 1], [])
    record = end.record(1, [0, 1])
    record.attempt.number += 1
    end.handle(rig, Metadata(1, record.SerializeToString()))
    assert rig.take_sent() == [Refused(1, *ANOTHER_ATTEMPT)]
    assert still_free(end, rig)


@pytest.mark.parametrize(
    ("field", "reported"), [("ticket_signature", UNSIGNED), ("ticket_body", UNSIGNED), ("", UNREADABLE)]
)
def test_a_forged_ticket_binds_nothing(
    end: ReceivingEnd, rig: LinkRig, field: str, reported: tuple[ErrorKind, str]
) -> None:
    end.transfers.expect(1, [0, 1], [])
    record = end.record(1, [0, 1])
    if field:
        setattr(record, field, getattr(record, field)[:-1] + b"?")
    message = record.SerializeToString() if field else b"\xff"
    end.handle(rig, Metadata(1, message))
    assert rig.take_sent() == [Refused(1, *reported)]
    assert still_free(end, rig)


def test_a_commit_without_a_ticket_commits_nothing(end: ReceivingEnd, rig: LinkRig) -> None:
    end.transfers.expect(1, [0, 1], [])
    end.commit(rig, 1, [0, 1])
    assert rig.take_sent() == [Refused(1, ErrorKind.FORBIDDEN, "no ticket came before the commit")]
    assert still_free(end, rig)


def refused(end: ReceivingEnd, rig: LinkRig, reported: tuple[ErrorKind, str]) -> None:
    """Transfer 1 has ended with this."""
    answer = Refused(1, *reported)
    assert rig.take_sent() == [answer, Stop(1, StopReason.REFUSED)]
    expected: list[ReceiverEvent] = [Withdrawn(1, WithdrawReason.REFUSED, reported[1])]
    assert end.take_events() == expected
    assert (rig.link.transfers, len(end.transfers)) == (set(), 0)
    end.commit(rig, 1, [0, 0])
    assert rig.take_sent() == [answer]


def test_a_commit_that_cannot_be_parsed(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    end.handle(rig, Commit(1, b"\xff"))
    refused(end, rig, UNREADABLE)


def test_a_commit_of_another_attempt(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    attempt = end.ticket(1, []).attempt
    attempt.number += 1
    end.handle(rig, Commit(1, CommitRecord(attempt=attempt, block_counts=[0, 0]).SerializeToString()))
    refused(end, rig, ANOTHER_ATTEMPT)


def test_missing_pieces(end: ReceivingEnd, rig: LinkRig) -> None:
    """The failure says that another attempt may succeed."""
    end.bind(rig, 1, [2, 1], [1, 0])
    end.commit(rig, 1, [1, 1])
    refused(end, rig, (ErrorKind.UNAVAILABLE, "3 pieces never arrived"))


@pytest.mark.parametrize(
    ("sent", "ticket", "held", "reported"),
    [
        (
            [1, 1],
            [2, 1],
            [0, 0],
            "[1, 1] sent, [2, 1] in the ticket, [2, 1] expected, [1, 0] of them resident",
        ),
        (
            [2, 1],
            [2, 1],
            [1, 0],
            "[2, 1] sent, [2, 1] in the ticket, [2, 1] expected, [1, 0] of them resident",
        ),
        (
            [1, 1],
            [1, 1],
            [1, 0],
            "[1, 1] sent, [1, 1] in the ticket, [2, 1] expected, [1, 0] of them resident",
        ),
    ],
    ids=["held", "sent", "ticket"],
)
def test_counts_that_differ(
    end: ReceivingEnd, rig: LinkRig, sent: list[int], ticket: list[int], held: list[int], reported: str
) -> None:
    end.transfers.expect(1, [2, 1], [1, 0])
    end.handle(rig, Metadata(1, end.record(1, ticket, held).SerializeToString()))
    end.commit(rig, 1, sent)
    refused(end, rig, (ErrorKind.INTERNAL, f"block counts differ: {reported}"))


def test_a_transfer_with_metadata_has_the_counts_of_its_commit(end: ReceivingEnd, rig: LinkRig) -> None:
    """And the first token of its commit, whatever its metadata has."""
    end.transfers.expect(1, [0, 0], [])
    record = end.record(1, [0, 0])
    record.prompt_length, record.first_token_id, record.first_number = 3, 8, 9
    record.block_counts[:] = [5, 5]
    record.first_logprobs.logprob = -2.0
    end.handle(rig, Metadata(1, record.SerializeToString()))
    end.take_events()
    found = CommitRecord(block_counts=[0, 0], first_token_id=1, first_number=2)
    end.handle(rig, Commit(1, found.SerializeToString()))
    (committed,) = end.take_events()
    assert isinstance(committed, Committed)
    reported = committed.record
    assert (reported.first_token_id, reported.first_number, list(reported.block_counts)) == (1, 2, [0, 0])
