"""Rules of every transport for ends that do not fit: each gets the difference before any byte.

`test_contract.py` runs it on each. Each test ends with the ledger: all credits home, no pin, staging free,
bytes shipped = blocks × block size.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.protocol.frames import WithdrawReason
from tests.kvtransfer.conftest import LinkPeers
from tests.kvtransfer.support.peers import identity


class OpeningContract:
    """Tests of opening links, for any transport."""

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
        monkeypatch.setattr("kvtransfer.protocol.handshake.PROTOCOL_MIN", 7)
        peers = link_peers()
        transfer = peers.begin(1, [1])
        transfer.commit(peers.record(transfer))
        peers.run_until(lambda: 1 in peers.failures())
        assert "protocol differs" in peers.failures()[1].message
        assert "supports 7 to 6" in peers.failures()[1].message

    def test_another_rank(self, link_peers: LinkPeers) -> None:
        other = WorkerIdentity(name="sender", incarnation=b"\1" * 16, rank=1, rank_count=2)
        peers = link_peers(sender=other)
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

    def test_unusable_tickets(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        bad: list[tuple[dict[str, Any], list[int]]] = [({"endpoints": []}, [1]), ({}, [1, 1])]
        for changes, counts in bad:
            with pytest.raises(BatonError) as error:
                peers.sender.begin(*peers.ticket(1, counts, **changes))
            assert error.value.kind is ErrorKind.INVALID

    def test_pushes_outside_the_ticket(self, link_peers: LinkPeers) -> None:
        peers = link_peers()
        transfer = peers.begin(1, [3])
        peers.push(transfer, 0, 1, 1)
        unwanted = [(0, 3, 1), (0, 2, 2), (1, 0, 1), (-1, 0, 1), (0, -1, 1)]
        twice = [(0, 1, 1), (0, 0, 2)]
        for group, first, count in unwanted + twice:
            with pytest.raises(ValueError):
                transfer.push(group, first, [1] * count)
        assert transfer.queued_blocks == 1
        transfer.withdraw(WithdrawReason.ABORTED)
