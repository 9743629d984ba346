"""Steps of a receiver's poll, their order, and its wake-ups for another poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import CommitRecord
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.protocol import frames
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.checksum import PieceChecksum
from kvtransfer.protocol.frames import (
    Commit,
    Metadata,
    Piece,
    ReceiverFrame,
    Refused,
    SenderControl,
    StopAck,
    encode,
    encode_piece_header,
)
from kvtransfer.protocol.handshake import link_request
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import Committed, ReceiverEvent
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.transports.listen_config import ListenConfig
from tests.kvtransfer.support.memory_transport import MemoryTransport, Pipe
from tests.kvtransfer.support.peers import (
    FINGERPRINT,
    SECRET,
    FakeClock,
    Peers,
    Shape,
    Store,
    identity,
    make_sender,
)
from tests.support.waiting import block_until

SHAPE = Shape(block_bytes=(10,), piece_bytes=4, window_pieces=8)
_WINDOW = WindowSettings(SHAPE.piece_bytes, SHAPE.window_pieces)
# A frame that changes nothing but a counter: an unexpected acknowledgement.
IDLE = StopAck(99)


class OneReceiver:
    """A receiver with open links, one of each of its senders, whose frames are the test's."""

    def __init__(self, links: int) -> None:
        self.wakes = 0
        self.clock = FakeClock()
        self.sink = Store(SHAPE.block_bytes, SHAPE.blocks, 2)
        self.receiver = Receiver(
            settings=LinkSettings(identity("receiver"), FINGERPRINT, SHAPE.block_bytes, SHAPE.timeout_s),
            window=_WINDOW, signer=TicketSigner(SECRET),
            sink=self.sink, wake=self.wake, clock=self.clock,
        )  # fmt: skip
        transport = MemoryTransport(lambda: None)
        self.receiver.attach(transport)
        self.pipes: list[Pipe] = transport.pipes
        for link in range(links):
            request = link_request(
                identity(f"sender-{link}"), identity("receiver").incarnation, FINGERPRINT, 1
            )
            opening = threading.Thread(target=transport.open, args=(MemoryTransport.endpoint, request, 2.0))
            opening.start()
            block_until(lambda: bool(transport.requests))
            self.receiver.poll(1)  # takes it, as the last of the links
            opening.join()
            block_until(self._first_is_first, step=lambda: self.receiver.poll(1))
        self.tickets = Peers(
            SHAPE, self.receiver, make_sender(SHAPE, self.sink, self.wake, self.clock, []),
            (MemoryTransport.endpoint,),
            self.sink, self.sink, lambda: None,
        )  # fmt: skip

    def wake(self) -> None:
        self.wakes += 1

    def _first_is_first(self) -> bool:
        """True if the next poll begins with the first link."""
        return self.receiver.links[0].peer.name == "sender-0"

    def deliver(self, *frames: SenderControl, link: int = 0) -> None:
        self.pipes[link].to_receiver.extend(encode(frame) for frame in frames)

    def record(self, transfer: int, blocks: int) -> bytes:
        """Metadata with the ticket of a transfer of this many blocks."""
        ticket, body = self.tickets.ticket(transfer, [blocks])
        record = CommitRecord(attempt=body.attempt, token_ids=[1], prompt_length=1, block_counts=[blocks])
        record.ticket_body, record.ticket_signature = ticket.body, ticket.signature
        serialised: bytes = record.SerializeToString()
        return serialised

    def commits(self, transfer: int, link: int = 0) -> None:
        """Sends the commit of a transfer without blocks."""
        self.receiver.transfers.expect(transfer, [0])
        record = self.record(transfer, 0)
        self.deliver(Metadata(transfer, record), Commit(transfer, record), link=link)

    def reported(self, link: int = 0) -> list[ReceiverFrame]:
        """The frames that were sent to a link's peer since the last call."""
        reported = [frames.decode_from_receiver(message) for message in self.pipes[link].to_sender]
        self.pipes[link].to_sender.clear()
        return reported

    def left(self) -> list[int]:
        """The number of unread frames of each link."""
        return [len(pipe.to_receiver) for pipe in self.pipes]

    def polled(self, max_pieces: int) -> bool:
        """True if this poll asks for another."""
        before = self.wakes
        self.receiver.poll(max_pieces)
        return self.wakes > before


@pytest.fixture
def one() -> Iterator[OneReceiver]:
    made = OneReceiver(1)
    yield made
    made.receiver.close()


@pytest.fixture
def three() -> Iterator[OneReceiver]:
    made = OneReceiver(3)
    yield made
    made.receiver.close()


def test_a_poll_handles_at_most_max_frames_and_wakes_for_more(one: OneReceiver) -> None:
    one.deliver(*[IDLE] * 5)
    assert one.polled(3)
    assert one.receiver.counters.dropped_unknown == 3
    assert one.polled(2)
    assert one.receiver.counters.dropped_unknown == 5
    assert not one.polled(2)


def test_progress_has_the_same_bound(one: OneReceiver) -> None:
    one.deliver(*[IDLE] * 5)
    one.receiver.progress(3)
    assert one.left() == [2]


def test_links_take_turns(three: OneReceiver) -> None:
    """The link that was first in one poll is last in the next."""
    for link in range(3):
        three.deliver(*[IDLE] * 4, link=link)
    three.receiver.poll(4)
    assert three.left() == [2, 3, 3]
    three.receiver.poll(4)
    assert three.left() == [1, 1, 2]


def test_a_silent_link_takes_no_turn(three: OneReceiver) -> None:
    three.deliver(*[IDLE] * 3, link=2)
    assert three.polled(3)
    assert three.left() == [0, 0, 0]


def test_a_link_that_breaks_takes_no_further_turn(three: OneReceiver) -> None:
    """The link's piece is cut otherwise than was agreed, which no later frame can repair."""
    three.receiver.transfers.expect(7, [1])
    three.deliver(Metadata(7, three.record(7, 1)))
    for _ in range(3):  # until it is the first's turn again
        three.receiver.poll(9)
    data = b"ab"
    checksum = PieceChecksum(SHAPE.piece_bytes).of(memoryview(data), 7, 0, 0, 0)
    piece = Piece(transfer=7, group=0, ordinal=0, offset=0, length=2, staging=0, checksum=checksum)
    three.pipes[0].to_receiver.append(encode_piece_header(piece) + data)
    three.deliver(IDLE, IDLE, link=1)
    three.receiver.poll(3)
    assert three.left() == [0, 0, 0]
    assert {link.peer.name for link in three.receiver.links} == {"sender-1", "sender-2"}
    assert three.pipes[0].error is not None
    assert three.pipes[0].error.message == f"malformed frame: blocks are not cut into such pieces: {piece}"


def test_a_sender_with_unread_frames_is_not_overdue(one: OneReceiver) -> None:
    """The answer that it is late with may be among it."""
    one.receiver.transfers.expect(7, [1])
    one.deliver(Metadata(7, one.record(7, 1)))
    one.receiver.poll(9)
    one.receiver.transfers.forget(7)
    one.deliver(IDLE, StopAck(7))
    one.clock.now += SHAPE.timeout_s
    for _ in range(3):
        one.receiver.poll(1)
    assert one.left() == [0]
    assert one.receiver.counters.links_broken == 0


def committed(events: list[ReceiverEvent]) -> list[int]:
    return [event.transfer_id for event in events if isinstance(event, Committed)]


def test_commits_are_answered_and_counted(one: OneReceiver) -> None:
    for transfer in (7, 8, 9):
        one.commits(transfer)
    reported = committed([event for _ in range(9) for event in one.receiver.poll(1)])
    assert reported == [7, 8, 9]
    assert len(one.receiver.transfers) == 3
    before = time.monotonic_ns()
    one.receiver.transfers.acknowledge(7)
    one.receiver.transfers.refuse(8, BatonError(ErrorKind.FORBIDDEN, "spent"))
    one.receiver.transfers.acknowledge(9)
    first, refused, last = one.reported()
    for answer, transfer in ((first, 7), (last, 9)):
        assert isinstance(answer, frames.CommitAck)
        assert answer.transfer == transfer
        assert before <= answer.at_ns <= time.monotonic_ns()
    assert refused == Refused(8, ErrorKind.FORBIDDEN, "spent")
    assert one.receiver.counters.transfers_committed == 2
    assert len(one.receiver.transfers) == 0


def test_a_commit_is_reported_before_anything_else(one: OneReceiver) -> None:
    one.commits(7)
    one.receiver.progress(9)
    one.deliver(IDLE)
    before = one.wakes
    assert committed(one.receiver.poll(9)) == [7]
    assert one.left() == [1]
    assert one.wakes == before + 1, "for what it has left"
    assert one.receiver.poll(9) == []
    assert one.left() == [0]


class _Listener:
    """Counts how often it is asked for requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.asked = 0

    def next_request(self) -> None:
        self.asked += 1

    def close(self) -> None:
        """Does nothing: nothing was started."""


def test_it_listens_with_the_given_settings(one: OneReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    listeners = [_Listener(Endpoint("ipc", "here/1")), _Listener(Endpoint("grpc", "127.0.0.1:7"))]

    def start_listeners(*arguments: object) -> list[_Listener]:
        asked.append(arguments)
        return listeners

    monkeypatch.setattr("kvtransfer.receiver.receiver.start_listeners", start_listeners)
    here = ListenConfig("127.0.0.1")
    assert one.receiver.listen(here) == tuple(listener.endpoint for listener in listeners)
    assert asked == [(here, _WINDOW, SHAPE.timeout_s, one.wake, None)]
    one.receiver.poll(1)
    assert [listener.asked for listener in listeners] == [1, 1]
