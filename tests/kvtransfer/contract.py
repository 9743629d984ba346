"""What every transport must hold; `test_contract.py` runs it on each.

Each test ends with the ledger: all credits home, no pin, staging free, bytes shipped = blocks × block size.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from baton.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.events import Arrived, Committed
from kvtransfer.frames import Commit, Piece, Withdraw, WithdrawReason
from kvtransfer.outgoing import TransferState
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.peers import Shape, identity

ODD = Shape(block_bytes=(10_000, 333, 4096), piece_bytes=4096, window_pieces=6)


class HappyContract:
    """Bytes arrive, whole and in their places."""

    def test_several_groups_and_odd_sizes(self, link_peers: LinkPeers) -> None:
        peers = link_peers(ODD)
        blocks, places = [[1, 2, 3], [4, 5], [6]], [[9, 8, 7], [0, 1], [2]]
        peers.send(5, blocks, places)
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert peers.equal(blocks, places)
        assert [type(event) for event in peers.received] == [Arrived, Committed]
        peers.check_ledger()
        assert peers.sender.counters.blocks_shipped == [3, 2, 1]
        assert peers.receiver.counters.blocks_received == [3, 2, 1]
        sizes = peers.shape.block_bytes
        assert peers.receiver.counters.bytes_received == 3 * sizes[0] + 2 * sizes[1] + sizes[2]
        assert peers.receiver.expected_transfers == 0

    def test_the_record_arrives_as_it_was_given(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.send(5, [[1]], [[2]])
        peers.run_until(lambda: peers.acknowledged() == [5])
        record = next(event.record for event in peers.received if isinstance(event, Committed))
        assert list(record.token_ids) == [1, 2, 3]
        assert record.first_token_id == 7
        assert list(record.block_counts) == [1]

    def test_pushed_in_any_order_while_it_goes_on(self, link_peers: LinkPeers) -> None:
        peers = link_peers(ODD)
        peers.expect(5, [list(range(8)), [0], []])
        transfer = peers.begin(5, [8, 1, 0])
        ordinals = list(range(8))
        random.Random(3).shuffle(ordinals)
        for ordinal in ordinals:
            peers.push(transfer, 0, ordinal, 20 + ordinal)
            peers.step()
        peers.push(transfer, 1, 0, 3)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert peers.equal([list(range(20, 28)), [3]], [list(range(8)), [0]])
        peers.check_ledger()

    def test_longer_than_the_window(self, link_peers: LinkPeers) -> None:
        peers = link_peers(Shape(block_bytes=(9000,), piece_bytes=1000, window_pieces=2))
        blocks = [list(range(30))]
        peers.send(5, blocks, blocks)
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert peers.equal(blocks, blocks)
        peers.check_ledger()

    def test_a_transfer_without_blocks(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.send(5, [[]], [[]])
        peers.run_until(lambda: peers.acknowledged() == [5])
        peers.check_ledger()

    def test_a_small_one_is_not_stuck_behind_a_big_one(self, link_peers: LinkPeers) -> None:
        peers = link_peers(Shape(block_bytes=(4096,), window_pieces=8, blocks=300))
        big, small = [list(range(280))], [[290]]
        peers.send(1, big, big)
        peers.send(2, small, small)
        peers.run_until(lambda: 2 in peers.acknowledged())
        assert sum(piece[0] == 1 for piece in peers.sink.scattered) < 60
        peers.run_until(lambda: 1 in peers.acknowledged())
        assert peers.equal(big, big)
        assert peers.equal(small, small)
        peers.check_ledger()

    def test_one_that_comes_late_passes_three_long_ones(self, link_peers: LinkPeers) -> None:
        """Counted in pieces: the receiver takes one a step, and the window is full when it comes."""
        window, size = 8, 5
        peers = link_peers(Shape(block_bytes=(4096,), window_pieces=window, blocks=300))
        peers.pieces_a_poll = 1
        for big in (1, 2, 3):
            blocks = [list(range(80 * big - 80, 80 * big))]
            peers.send(big, blocks, blocks)
        peers.run_until(lambda: len(peers.sink.scattered) >= 30)
        before = len(peers.sink.scattered)
        small = [list(range(290, 290 + size))]
        peers.send(4, small, small)
        peers.run_until(lambda: 4 in peers.acknowledged())
        between = len(peers.sink.scattered) - before - size
        # What was on its way already, then a turn of each for every piece of its own and for the commit.
        assert between <= window + 3 * (size + 2)
        assert peers.equal(small, small)
        peers.run_until(lambda: len(peers.acknowledged()) == 4)
        peers.check_ledger()

    def test_many_interleaved_share_one_link(self, link_peers: LinkPeers) -> None:
        peers = link_peers(ODD)
        for transfer in range(1, 13):
            blocks = [[transfer, transfer + 13], [transfer], [transfer]]
            peers.send(transfer, blocks, blocks)
        peers.run_until(lambda: len(peers.acknowledged()) == 12)
        everything = [[*range(1, 13), *range(14, 26)], [*range(1, 13)], [*range(1, 13)]]
        assert peers.equal(everything, everything)
        assert peers.sender.counters.links_opened == 1
        assert peers.receiver.counters.links_opened == 1
        peers.check_ledger()

    def test_no_transfer_holds_more_than_half_the_window(self, link_peers: LinkPeers) -> None:
        peers = link_peers(Shape(window_pieces=8))
        peers.pieces_a_poll = 64
        peers.expect(1, [list(range(20))])
        transfer = peers.begin(1, [20])
        peers.push_all(transfer, [list(range(20))])
        link_peers.connector.deaf = True  # no credit comes home
        peers.run_until(lambda: transfer.held == 4)
        for _ in range(5):
            peers.step()
        assert transfer.held == 4
        assert peers.sender.links[0].free_pieces == 4
        link_peers.connector.deaf = False
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: peers.acknowledged() == [1])
        peers.check_ledger()


class CancelContract:
    """Either side may end a transfer at any moment; nothing leaks and no byte lands after."""

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13])
    def test_the_receiver_forgets(self, link_peers: LinkPeers, steps: int) -> None:
        peers = link_peers(Shape(block_bytes=(8192,), window_pieces=4))
        peers.send(1, [list(range(20))], [list(range(20))])
        peers.send(2, [[30]], [[30]])
        for _ in range(steps):
            peers.step()
        peers.forget(1)  # from here on the sink fails the test if a byte of it comes
        peers.run_until(lambda: 1 in peers.failures() and 2 in peers.acknowledged())
        assert (
            peers.failures()[1].kind is ErrorKind.CONFLICT or peers.failures()[1].kind is ErrorKind.NOT_FOUND
        )
        assert peers.equal([[30]], [[30]])
        peers.check_ledger()
        assert peers.receiver.expected_transfers == 0
        assert 1 not in peers.withdrawn()

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13])
    @pytest.mark.parametrize("reason", [WithdrawReason.FINISHED, WithdrawReason.ABORTED])
    def test_the_sender_withdraws(self, link_peers: LinkPeers, steps: int, reason: WithdrawReason) -> None:
        peers = link_peers(Shape(block_bytes=(8192,), window_pieces=4))
        peers.expect(1, [list(range(20))])
        transfer = peers.begin(1, [20])
        peers.push_all(transfer, [list(range(20))])
        for _ in range(steps):
            peers.step()
        transfer.withdraw(reason)
        transfer.withdraw(reason)
        assert not peers.source.pins or peers.on_device  # which may be reading them
        assert transfer.state is TransferState.WITHDRAWN
        peers.run_until(lambda: 1 in peers.withdrawn())
        assert peers.withdrawn()[1].reason is reason
        assert not peers.sent
        peers.check_ledger()
        counters = peers.sender.counters
        assert counters.bytes_shipped + counters.bytes_abandoned == peers.receiver.counters.bytes_received

    def test_forgotten_while_its_commit_waits_for_an_answer(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.answers = False
        peers.send(1, [[1]], [[1]])
        peers.run_until(lambda: any(isinstance(event, Committed) for event in peers.received))
        peers.forget(1)
        peers.run_until(lambda: 1 in peers.failures())
        peers.check_ledger()

    def test_a_refused_commit_tells_why(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.answers = False
        peers.send(1, [[1]], [[1]])
        peers.run_until(lambda: any(isinstance(event, Committed) for event in peers.received))
        peers.receiver.refuse(1, BatonError(ErrorKind.FORBIDDEN, "spent already"))
        peers.run_until(lambda: 1 in peers.failures())
        assert (peers.failures()[1].kind, peers.failures()[1].message) == (
            ErrorKind.FORBIDDEN,
            "spent already",
        )
        with pytest.raises(BatonError):
            peers.receiver.acknowledge(1)
        peers.check_ledger()

    def test_pushed_after_the_end_is_unpinned_at_once(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1, 2]])
        transfer = peers.begin(1, [2])
        transfer.withdraw(WithdrawReason.ABORTED)
        peers.push(transfer, 0, 0, 5)
        assert not peers.source.pins
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.withdrawn())
        peers.check_ledger()

    def test_blocks_reused_at_once_take_no_foreign_byte(self, link_peers: LinkPeers) -> None:
        peers = link_peers(Shape(block_bytes=(8192,), window_pieces=4))
        rng = random.Random(7)
        for round_ in range(1, 40):
            first, second = 2 * round_, 2 * round_ + 1
            peers.send(first, [[1, 2, 3]], [[5, 6, 7]])
            for _ in range(rng.randrange(6)):
                peers.step()
            peers.forget(first)
            peers.send(second, [[8, 9, 10]], [[5, 6, 7]])
            peers.run_until(lambda second=second: second in peers.acknowledged())  # type: ignore[misc]
            assert peers.equal([[8, 9, 10]], [[5, 6, 7]])
        peers.check_ledger()


class FaultContract:
    """What arrives wrong is noticed, counted, and fails no more than it must."""

    def test_a_flipped_bit(self, link_peers: LinkPeers) -> None:
        peers = link_peers(ODD)

        def flip(piece: Piece, payload: bytes) -> tuple[Piece, bytes]:
            if (piece.transfer, piece.group, piece.ordinal, piece.offset) != (1, 0, 2, 4096):
                return piece, payload
            return piece, payload[:77] + bytes([payload[77] ^ 0x10]) + payload[78:]

        link_peers.connector.tamper = flip
        peers.send(1, [[1, 2, 3, 4], [1], [1]], [[1, 2, 3, 4], [1], [1]])
        peers.send(2, [[7], [7], [7]], [[7], [7], [7]])
        peers.run_until(lambda: 1 in peers.failures() and 2 in peers.acknowledged())
        assert "checksum" in peers.failures()[1].message
        assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
        assert peers.withdrawn()[1].reason is WithdrawReason.CORRUPTED
        assert peers.receiver.counters.checksum_failures == 1
        assert (1, 0, 2, 4096) not in peers.sink.scattered
        assert peers.equal([[7], [7], [7]], [[7], [7], [7]])
        peers.check_ledger()
        assert peers.receiver.counters.links_broken == 0

    @pytest.mark.parametrize("change", [{"ordinal": 1}, {"group": 2}, {"offset": 8192}, {"transfer": 2}])
    def test_a_misplaced_piece(self, link_peers: LinkPeers, change: dict[str, int]) -> None:
        peers = link_peers(ODD)

        def misplace(piece: Piece, payload: bytes) -> tuple[Piece, bytes]:
            hit = (piece.transfer, piece.group, piece.ordinal, piece.offset) == (1, 0, 0, 0)
            return (dataclasses.replace(piece, **change) if hit else piece), payload

        link_peers.connector.tamper = misplace
        peers.expect(2, [[30, 31], [30], [30]])
        peers.send(1, [[1, 2], [1], [1]], [[1, 2], [1], [1]])
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.receiver.counters.checksum_failures == 1
        # A device sums while it writes, into a block that no slot has seen.
        assert all(piece[0] == 1 for piece in peers.sink.scattered) or peers.on_device
        peers.forget(2)
        peers.check_ledger()

    def test_a_lost_piece_is_missed_at_the_commit(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        link_peers.connector.tamper = lambda piece, payload: None if piece.ordinal == 1 else (piece, payload)
        peers.send(1, [[1, 2, 3]], [[1, 2, 3]])
        peers.run_until(lambda: 1 in peers.failures())
        assert "1 pieces never arrived" in peers.failures()[1].message
        assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
        assert peers.withdrawn()[1].reason is WithdrawReason.REFUSED

    def test_a_short_push_is_refused(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1, 2]])
        transfer = peers.begin(1, [2])
        peers.push(transfer, 0, 0, 1)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert "block counts differ: [1] sent, [2] in the ticket" in peers.failures()[1].message
        peers.check_ledger()

    def test_pieces_of_unknown_transfers_are_dropped(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [6])  # never expected
        peers.push_all(transfer, [list(range(6))])
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.CONFLICT
        peers.settle()
        assert peers.receiver.counters.dropped_unknown >= 1
        assert not peers.received
        peers.check_ledger()

    def test_a_commit_of_an_unknown_transfer_is_refused(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [0])
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.NOT_FOUND
        peers.check_ledger()

    def test_a_second_commit_gets_the_same_answer(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.send(1, [[1]], [[1]])
        peers.run_until(lambda: peers.acknowledged() == [1])
        assert transfer.record is not None
        for _ in range(3):
            link_peers.connector.wires[0].tell(Commit(1, transfer.record))
        link_peers.connector.wires[0].tell(Withdraw(1, WithdrawReason.ABORTED))
        peers.run_until(lambda: peers.receiver.counters.dropped_unknown == 4)
        peers.run_until(lambda: peers.sender.counters.dropped_unknown == 3)
        assert peers.acknowledged() == [1]
        assert len(peers.received) == 2
        peers.check_ledger()

    def test_a_repeated_piece_is_scattered_once(self, link_peers: LinkPeers) -> None:
        """The sink fails the test if it sees the same bytes twice."""
        peers = link_peers()
        sent: list[tuple[Piece, bytes]] = []

        def double(piece: Piece, payload: bytes) -> tuple[Piece, bytes]:
            sent.append((piece, payload))
            return sent[0] if piece.ordinal == 2 else (piece, payload)

        def restage(piece: Piece, payload: bytes) -> tuple[Piece, bytes]:
            first, data = double(piece, payload)
            return dataclasses.replace(first, staging=piece.staging), data

        link_peers.connector.tamper = restage
        peers.send(1, [[1, 2, 3]], [[1, 2, 3]])
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.receiver.counters.dropped_unknown == 1
        assert "never arrived" in peers.failures()[1].message
        peers.settle()

    def test_a_forged_ticket_pays_nothing(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1]])
        ticket, body = peers.ticket(1, [1])
        ticket.signature = b"\0" * 32
        transfer = peers.sender.begin(ticket, body)
        peers.push(transfer, 0, 0, 1)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.FORBIDDEN
        peers.check_ledger()

    def test_a_ticket_of_another_transfer_pays_nothing(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1]])
        other, _ = peers.ticket(9, [1])
        _, body = peers.ticket(1, [1])
        transfer = peers.sender.begin(other, body)
        peers.push(transfer, 0, 0, 1)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert "another transfer" in peers.failures()[1].message
        peers.check_ledger()

    def test_a_ticket_without_bytes_cannot_end_anothers_transfer(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1]])
        ticket, body = peers.ticket(1, [1])
        ticket.signature = b"\0" * 32
        thief = peers.sender.begin(ticket, body)
        thief.commit(peers.record(thief))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.receiver.expected_transfers == 1
        peers.forget(1)
        peers.check_ledger()

    def test_an_index_that_is_not_the_senders_breaks_the_link(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        link_peers.connector.tamper = lambda piece, payload: (
            (dataclasses.replace(piece, staging=999) if piece.ordinal == 1 else piece),
            payload,
        )
        peers.send(1, [[1, 2]], [[1, 2]])
        peers.run_until(lambda: 1 in peers.failures() and 1 in peers.withdrawn())
        assert "staging index 999 is not the sender's" in peers.withdrawn()[1].message
        assert "staging index 999 is not the sender's" in peers.failures()[1].message
        assert peers.receiver.counters.links_broken == 1
        peers.run_until(lambda: not peers.receiver.links)
        peers.send(2, [[2]], [[2]])
        link_peers.connector.tamper = lambda piece, payload: (piece, payload)
        peers.run_until(lambda: 2 in peers.acknowledged())
        peers.check_ledger()


class OpeningContract:
    """Ends that do not fit are told what differs before any byte."""

    def test_another_layout(self, link_peers: LinkPeers) -> None:
        peers = link_peers(fingerprint=b"g" * 32)
        transfer = peers.begin(1, [1])
        peers.push(transfer, 0, 0, 1)
        peers.run_until(lambda: 1 in peers.failures())
        error = peers.failures()[1]
        assert error.kind is ErrorKind.CONFLICT
        assert "layout fingerprint differs" in error.message
        assert (b"g" * 32).hex() in error.message
        assert (b"f" * 32).hex() in error.message
        peers.check_ledger()
        assert peers.receiver.counters.links_refused == 1

    def test_another_incarnation(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.sender.begin(*peers.ticket(1, [1], issuer=identity("receiver", 9)))
        peers.push(transfer, 0, 0, 1)
        peers.run_until(lambda: 1 in peers.failures())
        error = peers.failures()[1]
        assert error.kind is ErrorKind.UNAVAILABLE
        assert "incarnation differs" in error.message
        assert (b"\x09" * 16).hex() in error.message
        peers.check_ledger()

    def test_another_protocol(self, link_peers: LinkPeers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtransfer.opening.PROTOCOL_MIN", 4)
        peers = link_peers()
        transfer = peers.begin(1, [1])
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert "protocol differs" in peers.failures()[1].message
        assert "speaks 4 to 3" in peers.failures()[1].message

    def test_another_rank(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.sender._identity = WorkerIdentity(name="sender", incarnation=b"\1" * 16, rank=1, rank_count=2)
        transfer = peers.begin(1, [1])
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert "rank differs" in peers.failures()[1].message

    def test_a_withdrawal_before_the_link_is_open_still_arrives(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1]])
        peers.begin(1, [1]).withdraw(WithdrawReason.FINISHED)
        peers.run_until(lambda: 1 in peers.withdrawn())
        assert peers.withdrawn()[1].reason is WithdrawReason.FINISHED
        peers.check_ledger()

    def test_tickets_no_transfer_can_be_made_of(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        bad: list[tuple[dict[str, Any], list[int]]] = [({"transfer_address": ""}, [1]), ({}, [1, 1])]
        for changes, counts in bad:
            with pytest.raises(BatonError) as error:
                peers.sender.begin(*peers.ticket(1, counts, **changes))
            assert error.value.kind is ErrorKind.INVALID

    def test_pushes_that_the_ticket_has_no_place_for(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [2])
        peers.push(transfer, 0, 0, 1)
        for group, ordinal in ((0, 2), (1, 0), (-1, 0), (0, -1), (0, 0)):
            with pytest.raises(ValueError):
                transfer.push(group, ordinal, 1)
        transfer.withdraw(WithdrawReason.ABORTED)
