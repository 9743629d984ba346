"""What a sender is told of a record or a commit that is not right, and what it costs its transfer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.errors import ErrorKind
from baton.v1.decode_pb2 import TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.events import Committed, ReceiverEvent, Withdrawn
from kvtransfer.frames import Commit, Record, Refused, Stop, StopReason, WithdrawReason
from tests.kvtransfer.peers import identity
from tests.kvtransfer.receiving_end import Line, ReceivingEnd

Change = Callable[[TicketBody], None]
UNREADABLE = (ErrorKind.INTERNAL, "the commit record cannot be read")
ANOTHER_TRANSFER = (ErrorKind.FORBIDDEN, "the ticket was given for another transfer")
ANOTHER_ATTEMPT = (ErrorKind.FORBIDDEN, "the ticket was given for another attempt")
UNSIGNED = (ErrorKind.FORBIDDEN, "the ticket was not signed by this receiver")


@pytest.fixture
def end() -> ReceivingEnd:
    return ReceivingEnd()


@pytest.fixture
def line() -> Line:
    return Line("prefill-0")


def still_free(end: ReceivingEnd, line: Line) -> bool:
    """Whether transfer 1 waits for its right ticket as if nothing had come."""
    assert end.take_events() == []
    assert line.link.transfers == set()
    end.handle(line, Record(1, end.record(1, [0, 1]).SerializeToString()))
    return line.link.transfers == {1} and line.taken() == []


def other_transfer(body: TicketBody) -> None:
    body.transfer_id = 2


def other_start(body: TicketBody) -> None:
    body.issuer.CopyFrom(identity("receiver", 2))


@pytest.mark.parametrize("change", [other_transfer, other_start])
def test_a_ticket_of_something_else_binds_nothing(end: ReceivingEnd, line: Line, change: Change) -> None:
    end.arrivals.expect(1, [0, 1], [])
    body = end.ticket(1, [0, 1])
    change(body)
    end.handle(line, Record(1, end.record(1, [0, 1], body=body).SerializeToString()))
    assert line.taken() == [Refused(1, *ANOTHER_TRANSFER)]
    assert still_free(end, line)


def test_a_record_of_another_attempt_binds_nothing(end: ReceivingEnd, line: Line) -> None:
    end.arrivals.expect(1, [0, 1], [])
    record = end.record(1, [0, 1])
    record.attempt.number += 1
    end.handle(line, Record(1, record.SerializeToString()))
    assert line.taken() == [Refused(1, *ANOTHER_ATTEMPT)]
    assert still_free(end, line)


@pytest.mark.parametrize(
    ("field", "told"), [("ticket_signature", UNSIGNED), ("ticket_body", UNSIGNED), ("", UNREADABLE)]
)
def test_a_forged_ticket_binds_nothing(
    end: ReceivingEnd, line: Line, field: str, told: tuple[ErrorKind, str]
) -> None:
    end.arrivals.expect(1, [0, 1], [])
    record = end.record(1, [0, 1])
    if field:
        setattr(record, field, getattr(record, field)[:-1] + b"?")
    message = record.SerializeToString() if field else b"\xff"
    end.handle(line, Record(1, message))
    assert line.taken() == [Refused(1, *told)]
    assert still_free(end, line)


def test_a_commit_without_a_ticket_commits_nothing(end: ReceivingEnd, line: Line) -> None:
    end.arrivals.expect(1, [0, 1], [])
    end.commit(line, 1, [0, 1])
    assert line.taken() == [Refused(1, ErrorKind.FORBIDDEN, "no ticket came before the commit")]
    assert still_free(end, line)


def refused(end: ReceivingEnd, line: Line, told: tuple[ErrorKind, str]) -> None:
    """Transfer 1 has ended with this."""
    answer = Refused(1, *told)
    assert line.taken() == [answer, Stop(1, StopReason.REFUSED)]
    expected: list[ReceiverEvent] = [Withdrawn(1, WithdrawReason.REFUSED, told[1])]
    assert end.take_events() == expected
    assert (line.link.transfers, len(end.arrivals)) == (set(), 0)
    end.commit(line, 1, [0, 0])
    assert line.taken() == [answer]


def test_a_commit_that_cannot_be_read(end: ReceivingEnd, line: Line) -> None:
    end.bind(line, 1, [0, 0])
    end.handle(line, Commit(1, b"\xff"))
    refused(end, line, UNREADABLE)


def test_a_commit_of_another_attempt(end: ReceivingEnd, line: Line) -> None:
    end.bind(line, 1, [0, 0])
    attempt = end.ticket(1, []).attempt
    attempt.number += 1
    end.handle(line, Commit(1, CommitRecord(attempt=attempt, block_counts=[0, 0]).SerializeToString()))
    refused(end, line, ANOTHER_ATTEMPT)


def test_pieces_that_never_came(end: ReceivingEnd, line: Line) -> None:
    """Another attempt may be luckier."""
    end.bind(line, 1, [2, 1], [1, 0])
    end.commit(line, 1, [1, 1])
    refused(end, line, (ErrorKind.UNAVAILABLE, "3 pieces never arrived"))


@pytest.mark.parametrize(
    ("sent", "ticket", "held", "told"),
    [
        ([1, 1], [2, 1], [0, 0], "[1, 1] sent, [2, 1] in the ticket, [2, 1] expected, [1, 0] of them held"),
        ([2, 1], [2, 1], [1, 0], "[2, 1] sent, [2, 1] in the ticket, [2, 1] expected, [1, 0] of them held"),
        ([1, 1], [1, 1], [1, 0], "[1, 1] sent, [1, 1] in the ticket, [2, 1] expected, [1, 0] of them held"),
    ],
    ids=["held", "sent", "ticket"],
)
def test_counts_that_differ(
    end: ReceivingEnd, line: Line, sent: list[int], ticket: list[int], held: list[int], told: str
) -> None:
    end.arrivals.expect(1, [2, 1], [1, 0])
    end.handle(line, Record(1, end.record(1, ticket, held).SerializeToString()))
    end.commit(line, 1, sent)
    refused(end, line, (ErrorKind.INTERNAL, f"block counts differ: {told}"))


def test_a_described_transfer_has_the_counts_of_its_commit(end: ReceivingEnd, line: Line) -> None:
    """And the first token of its commit, whatever the record ahead says of it."""
    end.arrivals.expect(1, [0, 0], [])
    record = end.record(1, [0, 0])
    record.prompt_length, record.first_token_id, record.first_number = 3, 8, 9
    record.block_counts[:] = [5, 5]
    record.first_logprobs.logprob = -2.0
    end.handle(line, Record(1, record.SerializeToString()))
    end.take_events()
    found = CommitRecord(block_counts=[0, 0], first_token_id=1, first_number=2)
    end.handle(line, Commit(1, found.SerializeToString()))
    (committed,) = end.take_events()
    assert isinstance(committed, Committed)
    told = committed.record
    assert (told.first_token_id, told.first_number, list(told.block_counts)) == (1, 2, [0, 0])
