"""A sender's handling of tickets and answers of its receivers, and its wake-ups for another poll."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import (
    CommitAck,
    Credit,
    ReceiverFrame,
    Refused,
    Stop,
    StopAck,
    StopReason,
    Withdraw,
    WithdrawReason,
)
from kvtransfer.sender.events import Acknowledged, Failed
from kvtransfer.sender.transfer import Transfer, TransferState
from tests.kvtransfer.support.one_sender import MANY, OneSender
from tests.kvtransfer.support.several_routes import SHAPE


@pytest.fixture
def one() -> Iterator[OneSender]:
    made = OneSender("a")
    yield made
    made.close()


@pytest.fixture
def three() -> Iterator[OneSender]:
    made = OneSender("a", "b", "c")
    yield made
    made.close()


def failure(one: OneSender, transfer: Transfer) -> tuple[ErrorKind, str]:
    """The failure of this transfer, which this poll reports."""
    (failed,) = one.sender.poll(MANY)
    assert isinstance(failed, Failed)
    assert failed.transfer is transfer
    assert transfer.state is TransferState.FAILED
    return failed.error.kind, failed.error.message


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (TicketBody(block_counts=[1]), ErrorKind.INVALID, "the ticket has no endpoint to send to"),
        (
            TicketBody(endpoints=[Endpoint("grpc", "a:1").message()], block_counts=[1, 2, 3]),
            ErrorKind.INVALID,
            "the ticket has 3 cache groups, this sender 1",
        ),
        (
            TicketBody(endpoints=[Endpoint("grpc", "a:1").message()]),
            ErrorKind.INVALID,
            "the ticket has 0 cache groups, this sender 1",
        ),
    ],
)
def test_an_unusable_ticket_is_refused(
    one: OneSender, body: TicketBody, kind: ErrorKind, message: str
) -> None:
    with pytest.raises(BatonError) as error:
        one.sender.begin(Ticket(), body)
    assert (error.value.kind, error.value.message) == (kind, message)


def test_an_active_transfer_is_not_begun_again(one: OneSender) -> None:
    begun = one.begin(7)
    with pytest.raises(BatonError) as error:
        one.begin(7)
    assert (error.value.kind, error.value.message) == (ErrorKind.CONFLICT, "transfer 7 exists already")
    begun.withdraw(WithdrawReason.ABORTED)
    one.begin(7)


def test_two_receivers_keep_their_links(three: OneSender) -> None:
    assert [link.transport for link in three.sender.links] == ["a", "b", "c"]
    assert three.sender.counters.links_opened == 3
    assert three.sender.counters.links_broken == 0


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Stop(7, StopReason.REFUSED), ErrorKind.UNAVAILABLE, "the receiver refused the transfer"),
        (Stop(7, StopReason.UNKNOWN), ErrorKind.CONFLICT, "the receiver no longer expects this transfer"),
        (Refused(7, ErrorKind.OVERLOADED, "no room"), ErrorKind.OVERLOADED, "no room"),
    ],
)
def test_a_transfer_that_the_receiver_ends_fails_with_its_reason(
    one: OneSender, answer: ReceiverFrame, kind: ErrorKind, message: str
) -> None:
    transfer, other = one.begin(7, 2), one.begin(8)
    one.sender.poll(MANY)
    one.reported()
    one.deliver(answer)
    assert failure(one, transfer) == (kind, message)
    assert one.reported() == ([StopAck(7)] if isinstance(answer, Stop) else [])
    assert other.active
    assert one.sender.counters.transfers_failed == 1
    assert not one.source.pins


def test_answers_about_unknown_transfers_are_counted_and_dropped(one: OneSender) -> None:
    """A stop is acknowledged in any case, since its sender waits for that."""
    sending = one.begin(7)
    one.sender.poll(MANY)
    one.reported()
    one.deliver(
        Stop(98, StopReason.REFUSED), Stop(99, StopReason.UNKNOWN), Refused(99, ErrorKind.INTERNAL, "no"),
        CommitAck(99, 1), CommitAck(99, 1), CommitAck(7, 1),
    )  # fmt: skip
    assert one.sender.poll(MANY) == []
    assert one.sender.counters.dropped_unknown == 6
    assert one.reported() == [StopAck(98), StopAck(99)]
    assert sending.state is TransferState.SENDING, "it was not committed yet"


def test_an_accepted_commit_is_acknowledged_once(one: OneSender) -> None:
    transfers = [one.commit(7, 1), one.commit(8)]
    assert all(transfer.commit_deadline == one.clock.now + SHAPE.timeout_s for transfer in transfers)
    one.deliver(CommitAck(7, 1), CommitAck(7, 1), CommitAck(8, 1))
    events = one.sender.poll(MANY) + one.sender.poll(MANY) + one.sender.poll(MANY)
    assert [event.transfer for event in events] == transfers
    assert all(transfer.state is TransferState.ACKNOWLEDGED for transfer in transfers)
    assert one.sender.counters.transfers_acknowledged == 2
    assert one.sender.counters.dropped_unknown == 1
    assert [link.live_transfers for link in one.sender.links] == [0]


@pytest.mark.parametrize(
    ("transport", "reported_ns", "taken"), [("ipc", 5, True), ("a", 5, False), ("ipc", 1 << 62, False)]
)
def test_a_receivers_clock_counts_within_its_host_alone(
    transport: str, reported_ns: int, taken: bool
) -> None:
    """Elsewhere, and where it would be in the future, the time of the answer's arrival does."""
    one = OneSender(transport)
    transfer = one.commit(7)
    one.deliver(CommitAck(7, reported_ns))
    before = time.monotonic_ns()
    (event,) = one.sender.poll(MANY)
    assert isinstance(event, Acknowledged)
    assert (event.transfer, event.transport) == (transfer, transport)
    assert event.at_ns == reported_ns if taken else before <= event.at_ns <= time.monotonic_ns()
    one.close()


def test_a_commit_has_its_deadline_to_the_second(one: OneSender) -> None:
    transfer = one.commit(7, 1)
    one.reported()
    one.deliver(Credit((0, 1, 2)))
    one.clock.now += SHAPE.timeout_s - 0.25
    assert one.sender.poll(MANY) == []
    one.clock.now += 0.25
    assert failure(one, transfer) == (
        ErrorKind.DEADLINE,
        "receiver 'receiver' did not answer a commit for 3 s",
    )
    assert one.reported() == [Withdraw(7, WithdrawReason.ABORTED)]


def test_bytes_of_abandoned_blocks_are_counted(one: OneSender) -> None:
    """Four bytes of each, of ten that it has; of whole blocks all ten."""
    counters = one.sender.counters
    for transfer, abandoned in ((7, 4), (8, 8), (9, 12), (10, 16)):
        begun = one.begin(transfer, 1)
        one.sender.poll(2)  # the ticket, and a piece
        if transfer % 2:
            begun.withdraw(WithdrawReason.FINISHED)
        else:
            one.deliver(Refused(transfer, ErrorKind.INTERNAL, "no"))
            one.sender.poll(0)
        assert counters.bytes_abandoned == abandoned
    assert counters.transfers_failed == 2
    assert (counters.blocks_shipped, counters.bytes_shipped) == ([0], 0)
    one.deliver(Credit((0, 1, 2, 3)))
    one.sender.poll(0)
    for transfer in (11, 12):
        one.commit(transfer, 1)
    assert (counters.blocks_shipped, counters.bytes_shipped) == ([2], 20)


# -- polls ----------------------------------------------------------------------------------------


def test_a_poll_that_leaves_nothing_causes_no_wake_up(one: OneSender) -> None:
    one.begin(7, 1)
    assert not one.polled()
    assert not one.polled()


def test_a_poll_that_ships_its_maximum_wakes_for_another(one: OneSender) -> None:
    one.begin(7, 1)
    assert one.polled(2)
    assert one.pieces() == 1
    assert one.polled(1)
    assert one.polled(1)
    assert one.pieces() == 2
    assert not one.polled(1)


def test_an_answer_is_reported_at_once_and_later_frames_by_the_next_poll(one: OneSender) -> None:
    first, second = one.commit(7), one.commit(8)
    one.deliver(CommitAck(7, 1), CommitAck(8, 1))
    before = one.wakes
    assert [event.transfer for event in one.sender.poll(MANY)] == [first]
    assert one.wakes == before + 1
    assert [event.transfer for event in one.sender.poll(MANY)] == [second]


def test_many_frames_of_a_receiver_are_handled_in_several_polls(one: OneSender) -> None:
    one.deliver(*[Refused(99, ErrorKind.INTERNAL, "no")] * 300)
    assert one.polled()
    assert one.sender.counters.dropped_unknown == 256
    assert not one.polled()
    assert one.sender.counters.dropped_unknown == 300


def test_returned_credits_are_spent_within_the_polls_bound(one: OneSender) -> None:
    """One transfer uses at most four pieces of a window of eight."""
    one.begin(7, 6)
    one.sender.poll(MANY)
    assert one.pieces() == 4
    one.deliver(Credit((0, 1, 2, 3)))
    one.begin(8, 1)
    assert one.polled(5)  # its ticket, its three pieces, then one of the other's
    assert one.pieces() == 4


def test_links_take_turns_in_a_poll(three: OneSender) -> None:
    for link in range(3):
        three.begin(7, 3, link)
    three.sender.poll(3)  # tickets
    assert [three.pieces(link) for link in range(3)] == [0, 0, 0]
    three.sender.poll(5)
    assert [three.pieces(link) for link in range(3)] == [2, 2, 1]


def test_one_link_that_has_nothing_to_send_holds_up_none(three: OneSender) -> None:
    three.begin(7, 2, 1)
    assert not three.polled()
    assert [three.pieces(link) for link in range(3)] == [0, 4, 0]


def test_one_poll_handles_frames_of_all_receivers(three: OneSender) -> None:
    transfers = [three.commit(7 + link, link=link) for link in range(3)]
    for link in range(3):
        three.deliver(Refused(7 + link, ErrorKind.INTERNAL, "no"), link=link)
    assert {event.transfer for event in three.sender.poll(MANY)} == set(transfers)
