"""Rules of every transport for records that go ahead of their blocks. `test_contract.py` runs it on each."""

from __future__ import annotations

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt, Logprobs
from kvtransfer.protocol.frames import MAX_COMMIT_BYTES, Metadata, WithdrawReason
from kvtransfer.receiver.events import Committed, MetadataReceived, TransferStarted, Withdrawn
from kvtransfer.sender.transfer import Transfer
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.peers import Peers


def described(peers: Peers, transfer_id: int = 1) -> Transfer:
    """A transfer of one block, of which the receiver has the metadata alone."""
    peers.expect(transfer_id, [[4]])
    transfer = peers.begin(transfer_id, [1])
    transfer.send_metadata(CommitRecord(attempt=transfer.body.attempt, token_ids=[1, 2, 3], prompt_length=3))
    peers.run_until(lambda: any(event.transfer_id == transfer_id for event in peers.received))
    return transfer


def committed(peers: Peers) -> CommitRecord:
    """The record of the last event."""
    last = peers.received[-1]
    assert isinstance(last, Committed)
    return last.record


class DescribedContract:
    """Tests of records sent ahead, for any transport."""

    def test_metadata_is_reported_before_any_block_and_committed_with_the_first_token(
        self, link_peers: LinkPeers
    ) -> None:
        peers = link_peers()
        transfer = described(peers)
        (reported,) = peers.received
        assert isinstance(reported, MetadataReceived)
        assert list(reported.record.token_ids) == [1, 2, 3]
        assert not peers.sink.scattered
        peers.push_all(transfer, [[2]])
        transfer.commit(CommitRecord(first_token_id=7, first_number=5, first_logprobs=Logprobs(logprob=-1.5)))
        peers.run_until(lambda: peers.acknowledged() == [1])
        assert [type(event) for event in peers.received] == [MetadataReceived, TransferStarted, Committed]
        record = committed(peers)
        assert (list(record.token_ids), record.prompt_length) == ([1, 2, 3], 3)
        assert (record.first_token_id, record.first_number, record.first_logprobs.logprob) == (7, 5, -1.5)
        assert list(record.block_counts) == [1]
        assert peers.equal([[2]], [[4]])
        peers.check_ledger()

    def test_only_the_last_steps_results_are_taken_from_its_commit(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = described(peers)
        peers.push_all(transfer, [[2]])
        other = Attempt(request_id=b"x" * 16, number=9)
        transfer.commit(CommitRecord(attempt=other, token_ids=[8], prompt_length=1, first_token_id=7))
        peers.run_until(lambda: peers.acknowledged() == [1])
        record = committed(peers)
        assert (record.attempt, list(record.token_ids)) == (transfer.body.attempt, [1, 2, 3])
        assert (record.prompt_length, record.first_token_id) == (3, 7)

    def test_metadata_with_a_forged_ticket_is_refused_before_any_block(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[1]])
        ticket, body = peers.ticket(1, [1])
        transfer = peers.sender.begin(Ticket(body=ticket.body, signature=b"\0" * 32), body)
        transfer.send_metadata(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.FORBIDDEN
        assert not peers.received
        right = peers.begin(1, [1])
        peers.push_all(right, [[1]])
        right.commit(peers.record(right))
        peers.run_until(lambda: peers.acknowledged() == [1])
        peers.check_ledger()

    def test_metadata_of_an_unknown_transfer_is_refused(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [1])
        transfer.send_metadata(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
        peers.check_ledger()

    def test_repeated_metadata_changes_nothing(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = described(peers)
        signed, _ = peers.ticket(1, [1])
        second = CommitRecord(
            attempt=transfer.body.attempt, token_ids=[9], prompt_length=1,
            ticket_body=signed.body, ticket_signature=signed.signature,
        )  # fmt: skip
        link_peers.connector.wires[0].send(Metadata(1, second.SerializeToString()))
        peers.run_until(lambda: peers.receiver.counters.dropped_unknown == 1)
        peers.push_all(transfer, [[2]])
        transfer.commit(CommitRecord(first_token_id=7))
        peers.run_until(lambda: peers.acknowledged() == [1])
        assert list(committed(peers).token_ids) == [1, 2, 3]

    def test_a_transfer_forgotten_meanwhile_ends_at_its_sender(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = described(peers)
        peers.forget(1)
        peers.push_all(transfer, [[2]])
        transfer.commit(CommitRecord(first_token_id=7))
        peers.run_until(lambda: 1 in peers.failures())
        assert not peers.sink.scattered
        peers.check_ledger()

    def test_its_sender_may_withdraw_it(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        described(peers).withdraw(WithdrawReason.FINISHED)
        peers.run_until(lambda: len(peers.received) == 2)
        gone = peers.received[-1]
        assert isinstance(gone, Withdrawn)
        assert gone.reason is WithdrawReason.FINISHED
        peers.check_ledger()

    def test_it_ends_with_the_link_that_it_came_over(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        described(peers)
        link_peers.connector.wires[0].close()
        peers.run_until(lambda: len(peers.received) == 2)
        gone = peers.received[-1]
        assert isinstance(gone, Withdrawn)
        assert gone.reason is WithdrawReason.LINK_LOST

    def test_metadata_that_is_too_large_is_refused(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [1])
        with pytest.raises(BatonError, match="is too large"):
            transfer.send_metadata(CommitRecord(token_ids=[1 << 30] * (MAX_COMMIT_BYTES // 5 + 1)))
        transfer.withdraw(WithdrawReason.ABORTED)
