"""Rules of every transport for messages that arrive wrong: noticed, counted, and failing no more than they
must.

`test_contract.py` runs it on each. Each test ends with the ledger: all credits home, no pin, staging free,
bytes shipped = blocks × block size.
"""

from __future__ import annotations

import dataclasses

import pytest

from baton.base.errors import ErrorKind
from kvtransfer.protocol.frames import Commit, Piece, Withdraw, WithdrawReason
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.peers import ODD


class FaultContract:
    """Tests of faults on the wire, for any transport."""

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
        # No ticket came for transfer 2: what claims to be of it is not even looked at.
        assert peers.receiver.counters.checksum_failures == (0 if "transfer" in change else 1)
        # A device sums while it writes, into a block that no slot has seen.
        assert all(piece[0] == 1 for piece in peers.sink.scattered) or peers.on_device
        peers.forget(2)
        peers.check_ledger()

    def test_a_lost_piece_is_detected_at_the_commit(self, link_peers: LinkPeers) -> None:
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
        assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
        peers.settle()
        assert peers.receiver.counters.dropped_unknown >= 1
        assert not peers.received
        peers.check_ledger()

    def test_a_commit_of_an_unknown_transfer_is_refused(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [0])
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
        peers.check_ledger()

    def test_a_second_commit_gets_the_same_answer(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.send(1, [[1]], [[1]])
        peers.run_until(lambda: peers.acknowledged() == [1])
        assert transfer.record is not None
        for _ in range(3):
            link_peers.connector.wires[0].send(Commit(1, transfer.record))
        link_peers.connector.wires[0].send(Withdraw(1, WithdrawReason.ABORTED))
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

    def test_a_forged_ticket_authorizes_nothing(self, link_peers: LinkPeers) -> None:
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

    def test_a_ticket_of_another_transfer_authorizes_nothing(self, link_peers: LinkPeers) -> None:
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
        assert len(peers.receiver.transfers) == 1
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
