"""One transfer at its sender: what may be pushed, how blocks leave in pieces, and when their pins end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt
from kvtransfer.protocol.frames import MAX_COMMIT_BYTES, WithdrawReason
from kvtransfer.protocol.piece_geometry import PieceGeometry
from kvtransfer.sender.transfer import PieceSource, Transfer, TransferState
from tests.support.events import FakeEvent

BLOCK_BYTES = (10, 4)
GEOMETRY = PieceGeometry(BLOCK_BYTES, 4)
SPANNING = PieceGeometry(BLOCK_BYTES, 40, multi_block=True)
ATTEMPT = Attempt(request_id=b"r" * 16, number=2)
TICKET = Ticket(body=b"the body", signature=b"the signature")


class Outgoing:
    """A transfer of six blocks and of three, the first of which the receiver holds already, and what it asks
    of its sender."""

    def __init__(self, counts: Sequence[int] = (6, 3), held: Sequence[int] = (0, 1)) -> None:
        self.unpinned: list[tuple[int, int]] = []
        self.whole: list[int] = []
        self.withdrawn: list[tuple[Transfer, WithdrawReason]] = []
        self.wakes = 0
        body = TicketBody(transfer_id=7, attempt=ATTEMPT, block_counts=counts, resident_counts=held)
        self.transfer = Transfer(
            TICKET, body, BLOCK_BYTES, self, self.whole.append, self._withdraw, self._wake
        )  # fmt: skip

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        raise AssertionError("its sender reads")

    def unpin(self, group: int, block: int) -> None:
        self.unpinned.append((group, block))

    def _withdraw(self, transfer: Transfer, reason: WithdrawReason) -> None:
        self.withdrawn.append((transfer, reason))

    def _wake(self) -> None:
        self.wakes += 1

    def pieces(self, geometry: PieceGeometry, most_blocks: int = 1) -> list[PieceSource]:
        """All that are left, as they are put on the wire and read."""
        found = []
        while self.transfer.has_piece():
            found.append(self.transfer.next_piece(geometry, most_blocks))
            self.transfer.shipped(found[-1])
            self.transfer.read_done(found[-1])
        return found


@pytest.fixture
def outgoing() -> Outgoing:
    return Outgoing()


def places(pieces: Sequence[PieceSource]) -> list[tuple[tuple[int, ...], int, int, int, int, bool]]:
    """The place of each piece: blocks, group, ordinal, offset, length, and whether it ends with its block."""
    return [(piece.blocks, *piece[1:]) for piece in pieces]


def test_a_new_transfer_has_nothing_but_its_ticket_to_send(outgoing: Outgoing) -> None:
    transfer = outgoing.transfer
    assert (transfer.transfer_id, transfer.state, transfer.active) == (7, TransferState.SENDING, True)
    assert transfer.metadata is not None
    assert CommitRecord.FromString(transfer.metadata) == CommitRecord(
        attempt=ATTEMPT, ticket_body=b"the body", ticket_signature=b"the signature"
    )
    assert (transfer.record, transfer.commit_deadline, transfer.pieces_in_flight) == (None, float("inf"), 0)
    assert (transfer.bytes_shipped, transfer.bytes_partial, transfer.queued_blocks) == (0, 0, 0)
    assert not transfer.has_piece()
    assert outgoing.wakes == 0


@pytest.mark.parametrize(
    ("group", "first", "blocks", "which"),
    [
        (-1, 0, [1], "blocks 0 to 0 of group -1"),
        (2, 0, [1], "blocks 0 to 0 of group 2"),
        (0, -1, [1], "blocks -1 to -1 of group 0"),
        (0, 5, [1, 2], "blocks 5 to 6 of group 0"),
        (0, 6, [1], "blocks 6 to 6 of group 0"),
        (1, 0, [1], "blocks 0 to 0 of group 1"),
        (1, 0, [1, 2, 3], "blocks 0 to 2 of group 1"),
    ],
)
def test_blocks_outside_the_ticket_are_refused(
    outgoing: Outgoing, group: int, first: int, blocks: list[int], which: str
) -> None:
    with pytest.raises(ValueError, match=f"^the ticket does not expect {which}$"):
        outgoing.transfer.push(group, first, blocks)
    assert (outgoing.transfer.queued_blocks, outgoing.wakes) == (0, 0)


def test_every_place_of_the_ticket_is_accepted_once(outgoing: Outgoing) -> None:
    outgoing.transfer.push(0, 0, [1, 2])
    outgoing.transfer.push(0, 3, [4, 5, 6])
    outgoing.transfer.push(1, 1, [7, 8])
    for first, blocks in ((1, [9, 9]), (2, [9, 9]), (0, [9] * 6)):
        which = f"blocks {first} to {first + len(blocks) - 1} of group 0"
        with pytest.raises(ValueError, match=f"^some of {which} were pushed before$"):
            outgoing.transfer.push(0, first, blocks)
    outgoing.transfer.push(0, 2, [3])
    assert outgoing.transfer.queued_blocks == 8
    assert outgoing.unpinned == []


def test_a_push_of_no_blocks_is_none(outgoing: Outgoing) -> None:
    outgoing.transfer.push(0, 6, [])
    outgoing.transfer.push(1, 1, [])
    assert (outgoing.transfer.queued_blocks, outgoing.wakes) == (0, 0)


def test_the_sender_is_woken_by_the_first_blocks_alone(outgoing: Outgoing) -> None:
    """A sender that ships the first continues with those pushed meanwhile."""
    outgoing.transfer.push(0, 0, [1])
    assert outgoing.wakes == 1
    outgoing.transfer.push(0, 1, [2])
    assert outgoing.wakes == 1
    outgoing.pieces(GEOMETRY)
    outgoing.transfer.push(0, 2, [3])
    assert outgoing.wakes == 2


def test_a_block_leaves_in_pieces_and_is_unpinned_with_the_last(outgoing: Outgoing) -> None:
    outgoing.transfer.push(0, 2, [50])
    outgoing.transfer.push(1, 1, [60])
    transfer = outgoing.transfer
    done: list[PieceSource] = []
    for _ in range(4):
        assert transfer.next_group() == (0 if len(done) < 3 else 1)
        piece = transfer.next_piece(GEOMETRY)
        transfer.shipped(piece)
        transfer.read_done(piece)
        done.append(piece)
        assert outgoing.unpinned == [[], [], [(0, 50)], [(0, 50), (1, 60)]][len(done) - 1]
        assert outgoing.whole == [[], [], [0], [0, 1]][len(done) - 1]
        assert (transfer.bytes_shipped, transfer.bytes_partial) == [(0, 4), (0, 8), (10, 0), (14, 0)][
            len(done) - 1
        ]
    assert places(done) == [
        ((50,), 0, 2, 0, 4, False),
        ((50,), 0, 2, 4, 4, False),
        ((50,), 0, 2, 8, 2, True),
        ((60,), 1, 1, 0, 4, True),
    ]
    assert not transfer.has_piece()


def test_a_block_stays_pinned_until_every_piece_of_it_was_read(outgoing: Outgoing) -> None:
    """A device reads behind the wire: pieces are shipped before they are read."""
    outgoing.transfer.push(0, 0, [50])
    pieces = []
    for _ in range(3):
        pieces.append(outgoing.transfer.next_piece(GEOMETRY))
        outgoing.transfer.shipped(pieces[-1])
    assert not outgoing.transfer.has_piece()
    for piece in pieces[:2]:
        outgoing.transfer.read_done(piece)
        assert outgoing.unpinned == []
    outgoing.transfer.read_done(pieces[2])
    assert outgoing.unpinned == [(0, 50)]


def test_blocks_that_are_read_when_the_transfer_ends_are_unpinned_after_it(outgoing: Outgoing) -> None:
    outgoing.transfer.push(0, 0, [50, 51])
    first, second = (outgoing.transfer.next_piece(GEOMETRY) for _ in range(2))
    outgoing.transfer.end(TransferState.FAILED)
    assert outgoing.unpinned == [(0, 51)]
    assert (outgoing.transfer.state, outgoing.transfer.active) == (TransferState.FAILED, False)
    assert not outgoing.transfer.has_piece()
    outgoing.transfer.read_done(first)
    assert outgoing.unpinned == [(0, 51)]
    outgoing.transfer.read_done(second)
    assert outgoing.unpinned == [(0, 51), (0, 50)]


def test_blocks_that_follow_each_other_are_one_piece(outgoing: Outgoing) -> None:
    """Another piece begins where blocks differ in group or step, or leave out an ordinal."""
    step, later = FakeEvent(), FakeEvent()
    outgoing.transfer.push(0, 0, [50, 51], step)
    outgoing.transfer.push(0, 2, [52], step)
    outgoing.transfer.push(0, 3, [53], later)
    outgoing.transfer.push(0, 5, [55], later)
    outgoing.transfer.push(0, 4, [54], later)
    outgoing.transfer.push(1, 1, [60], later)
    pieces = outgoing.pieces(SPANNING, 4)
    assert places(pieces) == [
        ((50, 51, 52), 0, 0, 0, 30, True),
        ((53,), 0, 3, 0, 10, True),
        ((55,), 0, 5, 0, 10, True),
        ((54,), 0, 4, 0, 10, True),
        ((60,), 1, 1, 0, 4, True),
    ]
    assert [piece.after for piece in pieces] == [step, later, later, later, later]
    assert outgoing.whole == [0, 0, 0, 0, 0, 0, 1]
    assert outgoing.unpinned == [(0, 50), (0, 51), (0, 52), (0, 53), (0, 55), (0, 54), (1, 60)]
    assert (outgoing.transfer.bytes_shipped, outgoing.transfer.bytes_partial) == (64, 0)


@pytest.mark.parametrize(
    ("most_blocks", "runs"),
    [(1, [(50,), (51,), (52,)]), (2, [(50, 51), (52,)]), (3, [(50, 51, 52)]), (9, [(50, 51, 52)])],
)
def test_a_piece_has_so_many_blocks_at_most(
    outgoing: Outgoing, most_blocks: int, runs: list[tuple[int, ...]]
) -> None:
    outgoing.transfer.push(0, 0, [50, 51, 52])
    assert [piece.blocks for piece in outgoing.pieces(SPANNING, most_blocks)] == runs


def test_a_started_block_is_finished_by_single_block_pieces(outgoing: Outgoing) -> None:
    outgoing.transfer.push(0, 0, [50, 51])
    begun = outgoing.transfer.next_piece(GEOMETRY)
    outgoing.transfer.shipped(begun)
    assert places([begun, *outgoing.pieces(SPANNING, 2)]) == [
        ((50,), 0, 0, 0, 4, False),
        ((50,), 0, 0, 4, 6, True),
        ((51,), 0, 1, 0, 10, True),
    ]


def test_a_piece_is_final_when_the_step_of_its_block_has_ended(outgoing: Outgoing) -> None:
    transfer, step = outgoing.transfer, FakeEvent()
    transfer.push(0, 0, [50], step)
    transfer.push(0, 1, [51])
    assert not transfer.is_final()
    step.complete = True
    assert transfer.is_final()
    transfer.shipped(transfer.next_piece(SPANNING))
    assert transfer.is_final(), "a block that was final when it was pushed"


def test_metadata_is_sent_with_the_ticket(outgoing: Outgoing) -> None:
    outgoing.transfer.send_metadata(CommitRecord(attempt=ATTEMPT, token_ids=[1, 2], prompt_length=2))
    assert outgoing.transfer.metadata is not None
    assert CommitRecord.FromString(outgoing.transfer.metadata) == CommitRecord(
        attempt=ATTEMPT, token_ids=[1, 2], prompt_length=2,
        ticket_body=b"the body", ticket_signature=b"the signature",
    )  # fmt: skip
    assert outgoing.wakes == 1


def test_metadata_cannot_follow_its_ticket(outgoing: Outgoing) -> None:
    outgoing.transfer.metadata = None  # it is on the wire
    with pytest.raises(AssertionError, match=r"^metadata follows begin, before a poll$"):
        outgoing.transfer.send_metadata(CommitRecord(attempt=ATTEMPT))


def test_a_commit_counts_what_was_pushed_and_comes_once(outgoing: Outgoing) -> None:
    transfer = outgoing.transfer
    transfer.push(0, 0, [50, 51])
    transfer.push(0, 2, [52])
    outgoing.wakes = 0
    given = CommitRecord(first_token_id=9, block_counts=[77])
    transfer.commit(given)
    assert transfer.record is not None
    assert CommitRecord.FromString(transfer.record) == CommitRecord(first_token_id=9, block_counts=[3, 0])
    assert list(given.block_counts) == [77], "the caller's own is left as it was"
    assert outgoing.wakes == 1
    with pytest.raises(ValueError, match=r"^commit twice$"):
        transfer.commit(given)
    with pytest.raises(ValueError, match=r"^push after commit$"):
        transfer.push(0, 3, [53])
    assert transfer.queued_blocks == 3


def test_after_the_end_pushed_blocks_are_unpinned_and_a_commit_is_nothing(outgoing: Outgoing) -> None:
    transfer = outgoing.transfer
    transfer.push(1, 1, [60])
    for _ in range(2):
        transfer.withdraw(WithdrawReason.FINISHED)
    assert outgoing.withdrawn == [(transfer, WithdrawReason.FINISHED)]
    assert transfer.state is TransferState.WITHDRAWN
    assert outgoing.wakes == 2, "by the push, and once by the end"
    transfer.push(0, 99, [50, 51])
    transfer.commit(CommitRecord())
    assert outgoing.unpinned == [(1, 60), (0, 50), (0, 51)]
    assert (transfer.record, transfer.queued_blocks, outgoing.wakes) == (None, 0, 2)


def test_the_largest_record_is_sent_and_none_larger() -> None:
    record = CommitRecord(ticket_signature=b"x" * MAX_COMMIT_BYTES, block_counts=[0, 0])
    excess = record.ByteSize() - MAX_COMMIT_BYTES
    record.ticket_signature = record.ticket_signature[excess:]
    outgoing = Outgoing()
    outgoing.transfer.commit(record)
    assert outgoing.transfer.record is not None
    assert len(outgoing.transfer.record) == MAX_COMMIT_BYTES
    record.ticket_signature += b"x"
    with pytest.raises(BatonError) as error:
        Outgoing().transfer.commit(record)
    assert (error.value.kind, error.value.message) == (
        ErrorKind.INVALID,
        f"a commit record of {MAX_COMMIT_BYTES + 1} bytes is too large",
    )
