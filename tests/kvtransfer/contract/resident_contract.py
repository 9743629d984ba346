"""Rules of every transport for leading blocks of a transfer that the receiver has already: they are neither
sent nor written. `test_contract.py` runs it on each."""

from __future__ import annotations

import numpy as np
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.receiver.events import Committed
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.peers import ODD


class HeldContract:
    """Tests of resident blocks, for any transport."""

    def test_only_non_resident_blocks_are_sent(self, link_peers: LinkPeers) -> None:
        peers = link_peers(ODD)
        places, held = [[9, 8, 7, 6], [0, 1], [2]], [3, 0, 1]
        before = peers.sink.groups[0][[9, 8, 7]].copy(), peers.sink.groups[2][[2]].copy()
        peers.expect(5, places, held)
        transfer = peers.begin(5, [4, 2, 1], held)
        peers.push(transfer, 0, 3, 40)
        for ordinal in (0, 1):
            peers.push(transfer, 1, ordinal, 50 + ordinal)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert peers.equal([[40], [50, 51], []], [[6], [0, 1], []])
        assert np.array_equal(peers.sink.groups[0][[9, 8, 7]], before[0])
        assert np.array_equal(peers.sink.groups[2][[2]], before[1])
        record = next(event.record for event in peers.received if isinstance(event, Committed))
        assert list(record.block_counts) == [1, 2, 0]
        assert (
            transfer.bytes_shipped
            == peers.receiver.counters.bytes_received
            == 10_000 + 2 * peers.shape.block_bytes[1]
        )
        assert peers.receiver.counters.blocks_received == [1, 2, 0]
        peers.check_ledger()

    def test_where_all_blocks_are_resident_only_the_commit_is_sent(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(5, [[3, 4]], [2])
        transfer = peers.begin(5, [2], [2])
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert not peers.sink.scattered
        peers.check_ledger()

    def test_a_resident_block_cannot_be_pushed(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [3], [2])
        for ordinal in (0, 1):
            with pytest.raises(ValueError, match="does not expect blocks"):
                transfer.push(0, ordinal, [1])
        transfer.withdraw(WithdrawReason.ABORTED)

    @pytest.mark.parametrize(("reported", "pushed"), [([], [0, 1, 2]), ([1], [1, 2]), ([3], [])], ids=str)
    def test_a_sender_with_other_resident_counts_is_refused(
        self, link_peers: LinkPeers, reported: list[int], pushed: list[int]
    ) -> None:
        """The ticket is valid; its sender misreads it, or uses the counts of another one."""
        peers = link_peers()
        peers.expect(1, [[5, 6, 7]], [2])
        before = peers.sink.groups[0][[5, 6]].copy()
        ticket, _ = peers.ticket(1, [3], [2])
        transfer = peers.sender.begin(ticket, peers.ticket(1, [3], reported)[1])
        for ordinal in pushed:
            peers.push(transfer, 0, ordinal, 20 + ordinal)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.INTERNAL
        assert np.array_equal(peers.sink.groups[0][[5, 6]], before)
        peers.forget(1)
        peers.check_ledger()

    def test_a_ticket_with_changed_counts_is_forged(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.expect(1, [[5, 6]], [1])
        ticket, _ = peers.ticket(1, [2], [1])
        _, claimed = peers.ticket(1, [2], [2])
        forged = Ticket(body=claimed.SerializeToString(deterministic=True), signature=ticket.signature)
        transfer = peers.sender.begin(forged, claimed)
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert peers.failures()[1].kind is ErrorKind.FORBIDDEN
        peers.forget(1)
        peers.check_ledger()

    @pytest.mark.parametrize("held", [[3], [1, 1]], ids=str)
    def test_a_ticket_with_more_resident_blocks_than_blocks_is_refused(
        self, link_peers: LinkPeers, held: list[int]
    ) -> None:
        peers = link_peers()
        with pytest.raises(BatonError, match="resident blocks") as error:
            peers.begin(1, [2], held)
        assert error.value.kind is ErrorKind.INVALID
        assert not peers.sender.links
