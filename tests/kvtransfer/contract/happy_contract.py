"""Rules of every transport where nothing goes wrong: bytes arrive, whole and in their places.

`test_contract.py` runs it on each. Each test ends with the ledger: all credits home, no pin, staging free,
bytes shipped = blocks × block size.
"""

from __future__ import annotations

import random

from kvtransfer.protocol.piece_geometry import max_pieces_per_transfer
from kvtransfer.receiver.events import Committed, TransferStarted
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.peers import ODD, Shape


class HappyContract:
    """Tests of transfers without faults, for any transport."""

    def test_several_groups_and_odd_sizes(self, link_peers: LinkPeers) -> None:
        peers = link_peers(ODD)
        blocks, places = [[1, 2, 3], [4, 5], [6]], [[9, 8, 7], [0, 1], [2]]
        peers.send(5, blocks, places)
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert peers.equal(blocks, places)
        assert [type(event) for event in peers.received] == [TransferStarted, Committed]
        peers.check_ledger()
        assert peers.sender.counters.blocks_shipped == [3, 2, 1]
        assert peers.receiver.counters.blocks_received == [3, 2, 1]
        sizes = peers.shape.block_bytes
        assert peers.receiver.counters.bytes_received == 3 * sizes[0] + 2 * sizes[1] + sizes[2]
        assert len(peers.receiver.transfers) == 0

    def test_the_record_arrives_unchanged(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.send(5, [[1]], [[2]])
        peers.run_until(lambda: peers.acknowledged() == [5])
        record = next(event.record for event in peers.received if isinstance(event, Committed))
        assert list(record.token_ids) == [1, 2, 3]
        assert record.first_token_id == 7
        assert list(record.block_counts) == [1]

    def test_blocks_may_be_pushed_in_any_order_during_the_transfer(self, link_peers: LinkPeers) -> None:
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
        blocks = [list(range(8))]
        peers.send(5, blocks, blocks)
        peers.run_until(lambda: peers.acknowledged() == [5])
        assert peers.equal(blocks, blocks)
        peers.check_ledger()

    def test_a_transfer_without_blocks(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        peers.send(5, [[]], [[]])
        peers.run_until(lambda: peers.acknowledged() == [5])
        peers.check_ledger()

    def test_a_small_transfer_is_not_stuck_behind_a_large_one(self, link_peers: LinkPeers) -> None:
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

    def test_a_late_transfer_overtakes_three_long_ones(self, link_peers: LinkPeers) -> None:
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
        # Counted where they arrive: while a commit's answer travels back, pieces go on.
        peers.run_until(lambda: (4, Committed) in [(one.transfer_id, type(one)) for one in peers.received])
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

    def test_no_transfer_occupies_more_than_its_share_of_the_window(self, link_peers: LinkPeers) -> None:
        share = max_pieces_per_transfer(8, between_devices=link_peers.rig is not None)
        assert share < 8
        peers = link_peers(Shape(window_pieces=8))
        peers.pieces_a_poll = 64
        peers.expect(1, [list(range(20))])
        transfer = peers.begin(1, [20])
        peers.push_all(transfer, [list(range(20))])
        link_peers.connector.deaf = True  # no credit returns
        peers.run_until(lambda: transfer.pieces_in_flight == share)
        for _ in range(5):
            peers.step()
        assert transfer.pieces_in_flight == share
        assert peers.sender.links[0].free_pieces == 8 - share
        link_peers.connector.deaf = False
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: peers.acknowledged() == [1])
        peers.check_ledger()
