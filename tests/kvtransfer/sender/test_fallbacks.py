"""A link that fell back to a slower transport returns to the better one without losing a transfer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.sender import routes
from kvtransfer.sender.events import Acknowledged
from kvtransfer.sender.routes import MAX_PAUSE_S, MIN_PAUSE_S, Fallbacks, LinkKey
from kvtransfer.sender.transfer import Transfer
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.ipc.control import address_of
from tests.kvtransfer.support.peers import Peers, Shape, make_peers

KEY = LinkKey((Endpoint("grpc", "address"),), b"incarnation")


def pauses(falls: Fallbacks, now: float, count: int) -> list[float]:
    """Pauses before `count` retries that fail, each made as soon as it is due."""
    found = []
    for _ in range(count):
        falls.fall_back(KEY, 1, "broken", now)
        began = now
        while not falls.due(KEY, now):
            now += 0.25
        found.append(now - began)
    return found


def test_pauses_double_up_to_their_bound() -> None:
    assert pauses(Fallbacks(), 100.0, 9) == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_until_a_retry_is_due_the_better_route_is_skipped() -> None:
    falls = Fallbacks()
    assert (falls.skipped(KEY, 0.0), falls.due(KEY, 0.0)) == (0, False)
    falls.fall_back(KEY, 1, "broken", 0.0)
    assert (falls.skipped(KEY, 0.9), falls.due(KEY, 0.9), falls.reason(KEY)) == (1, False, "broken")
    assert (falls.skipped(KEY, 1.0), falls.due(KEY, 1.0)) == (0, True)


def test_a_route_that_breaks_soon_after_its_return_waits_longer() -> None:
    falls = Fallbacks()
    falls.fall_back(KEY, 1, "broken", 0.0)
    falls.returned(KEY, 1.0)
    assert not falls.due(KEY, 2.0)
    falls.fall_back(KEY, 1, "broken", 3.0)
    assert (falls.due(KEY, 3.0 + 2 * MIN_PAUSE_S - 0.1), falls.due(KEY, 5.0)) == (False, True)
    falls.returned(KEY, 5.0)
    falls.fall_back(KEY, 1, "broken", 5.0 + MAX_PAUSE_S + 1)
    assert falls.due(KEY, 5.0 + MAX_PAUSE_S + 1 + MIN_PAUSE_S)


def test_kept_fallbacks_are_bounded() -> None:
    falls = Fallbacks()
    keys = [LinkKey((Endpoint("grpc", str(number)),), b"") for number in range(2000)]
    for key in keys:
        falls.fall_back(key, 1, "broken", 0.0)
    assert [falls.skipped(key, 0.0) for key in keys] == [0] * 976 + [1] * 1024


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr(routes, "MIN_PAUSE_S", 0.2)
    made = make_peers(Shape(), transport="auto")
    yield made
    made.close()


def transports(peers: Peers) -> list[str]:
    return [link.transport for link in peers.sender.links]


def half(peers: Peers, transfer_id: int) -> Transfer:
    """A transfer that goes over the link in use, and is not committed."""
    peers.expect(transfer_id, [[transfer_id, transfer_id + 1]])
    transfer = peers.begin(transfer_id, [2])
    peers.push(transfer, 0, 0, transfer_id)
    peers.run_until(lambda: transfer_id in peers.arrived())
    return transfer


def finish(peers: Peers, transfer: Transfer) -> str:
    """Sends the rest; the transport that carried it."""
    peers.push(transfer, 0, 1, transfer.transfer_id + 1)
    transfer.commit(peers.record(transfer))
    peers.run_until(lambda: transfer.transfer_id in peers.acknowledged())
    blocks = [[transfer.transfer_id, transfer.transfer_id + 1]]
    assert peers.equal(blocks, blocks)
    (event,) = [
        event
        for event in peers.sent
        if isinstance(event, Acknowledged) and event.transfer.transfer_id == transfer.transfer_id
    ]
    return event.transport


def broken_ipc(peers: Peers) -> None:
    assert finish(peers, half(peers, 1)) == "ipc"
    peers.wires[-1].close()
    peers.run_until(lambda: not peers.sender.links and not peers.receiver.links)


def test_a_link_returns_by_itself_and_transfers_end_where_they_are(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broken_ipc(peers)
    under_way = half(peers, 10)
    assert transports(peers) == ["grpc"]
    peers.run_until(lambda: transports(peers) == ["grpc", "ipc"])
    late = half(peers, 20)
    assert finish(peers, under_way) == "grpc"
    peers.run_until(lambda: transports(peers) == ["ipc"] and len(peers.receiver.links) == 1)
    assert finish(peers, late) == "ipc"
    counters = peers.sender.counters
    assert (counters.link_fallbacks, counters.links_returned, counters.transfers_failed) == (1, 1, 0)
    (line,) = [record for record in caplog.records if record.getMessage() == "link_returned"]
    assert (line.__dict__["transport"], line.__dict__["replaced"]) == ("ipc", "grpc")
    peers.check_ledger()


def test_an_unavailable_route_is_tried_less_and_less(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Endpoint("ipc", address_of("gone"))
    peers.endpoints = (gone, peers.endpoints[1])
    # A pause counts from the beginning of the iteration in which the route was tried.
    began = time.monotonic()
    iterations: list[float] = []
    tried: list[float] = []
    opened, poll = IpcConnector.open, peers.sender.poll

    def polled(*arguments: Any) -> Any:
        nonlocal began
        began = time.monotonic()
        return poll(*arguments)

    def noted(connector: IpcConnector, endpoint: Endpoint, *arguments: Any) -> Any:
        if endpoint == gone:
            iterations.append(began)
            tried.append(time.monotonic())
        return opened(connector, endpoint, *arguments)

    monkeypatch.setattr(peers.sender, "poll", polled)
    monkeypatch.setattr(IpcConnector, "open", noted)
    assert finish(peers, half(peers, 1)) == "grpc"
    peers.run_until(lambda: len(tried) == 3)
    _, second, third = tried
    assert second - iterations[0] >= 0.2
    assert third - iterations[1] >= 0.4
    assert finish(peers, half(peers, 10)) == "grpc"
    counters = peers.sender.counters
    assert (counters.link_fallbacks, counters.links_returned, counters.links_broken) == (1, 0, 0)
    assert transports(peers) == ["grpc"]


def test_a_replaced_link_closes_after_a_withdrawal_too(peers: Peers) -> None:
    broken_ipc(peers)
    under_way = half(peers, 10)
    peers.run_until(lambda: transports(peers) == ["grpc", "ipc"])
    under_way.withdraw(WithdrawReason.ABORTED)
    peers.run_until(lambda: transports(peers) == ["ipc"] and 10 in peers.withdrawn())
    peers.check_ledger()
