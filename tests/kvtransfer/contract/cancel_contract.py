"""Rules of every transport for a transfer that either side ends: nothing leaks, no byte is written
afterwards.

`test_contract.py` runs it on each. Each test ends with the ledger: all credits home, no pin, staging free,
bytes shipped = blocks × block size.
"""

from __future__ import annotations

import random

import pytest

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.receiver.events import Committed
from kvtransfer.sender.transfer import TransferState
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.peers import Shape


class CancelContract:
    """Tests of cancelled transfers, for any transport."""

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13])
    def test_the_receiver_forgets(self, link_peers: LinkPeers, steps: int) -> None:
        peers = link_peers(Shape(block_bytes=(8192,), window_pieces=4))
        peers.send(1, [list(range(20))], [list(range(20))])
        peers.send(2, [[30]], [[30]])
        for _ in range(steps):
            peers.step()
        peers.forget(1)  # from here on the sink fails the test if a byte of it comes
        peers.run_until(lambda: 1 in peers.failures() and 2 in peers.acknowledged())
        assert peers.failures()[1].kind in (ErrorKind.CONFLICT, ErrorKind.UNAVAILABLE)
        assert peers.equal([[30]], [[30]])
        peers.check_ledger()
        assert len(peers.receiver.transfers) == 0
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
        sent = peers.sender.counters.bytes_shipped + peers.sender.counters.bytes_abandoned
        received = peers.receiver.counters.bytes_received
        assert received == sent or (peers.on_device and received < sent)  # later pieces are not written

    def test_forgotten_while_its_commit_waits_for_an_answer(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.answers = False
        peers.send(1, [[1]], [[1]])
        peers.run_until(lambda: any(isinstance(event, Committed) for event in peers.received))
        peers.forget(1)
        peers.run_until(lambda: 1 in peers.failures())
        peers.check_ledger()

    def test_a_refused_commit_reports_the_reason(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.answers = False
        peers.send(1, [[1]], [[1]])
        peers.run_until(lambda: any(isinstance(event, Committed) for event in peers.received))
        peers.receiver.transfers.refuse(1, BatonError(ErrorKind.FORBIDDEN, "spent already"))
        peers.run_until(lambda: 1 in peers.failures())
        assert (peers.failures()[1].kind, peers.failures()[1].message) == (
            ErrorKind.FORBIDDEN,
            "spent already",
        )
        with pytest.raises(BatonError):
            peers.receiver.transfers.acknowledge(1)
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
