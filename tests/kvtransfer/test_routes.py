"""Several ways to one receiver: which is taken, and what happens when it breaks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from baton.errors import BatonError, ErrorKind
from kvtransfer.events import Acknowledged
from kvtransfer.ipc_control import address_of
from kvtransfer.routes import routes
from kvtransfer.transport import SenderWire
from kvtransfer.transports import connectors_of
from tests.kvtransfer.peers import Peers, Shape, make_peers


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Both ends have all that there is."""
    made = make_peers(Shape(), transport="auto")
    yield made
    made.close()


def send(peers: Peers, transfer: int) -> str:
    """Sends one transfer; the transport that carried it."""
    peers.send(transfer, [[transfer]], [[transfer]])
    peers.run_until(lambda: transfer in peers.acknowledged())
    peers.check_ledger()
    event = peers.sent[-1]
    assert isinstance(event, Acknowledged)
    assert [link.transport for link in peers.sender.links] == [event.transport]
    return event.transport


def wire(peers: Peers) -> SenderWire:
    (link,) = peers.sender._links.values()
    assert link._window is not None
    return link._window.wire


def cut(peers: Peers) -> None:
    """The link ends under the sender's hands."""
    wire(peers).close()
    peers.run_until(lambda: not peers.sender.links and not peers.receiver.links)


def test_within_a_host_it_is_ipc(peers: Peers) -> None:
    assert send(peers, 1) == "ipc"
    assert [link.transport for link in peers.receiver.links] == ["ipc"]
    assert peers.sender.counters.link_fallbacks == 0


def test_a_socket_that_is_not_there_leaves_grpc(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    peers.address = address_of("gone") + " " + peers.address.split()[1]
    assert send(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    assert any("goes over grpc" in line and "gone" in line for line in caplog.messages)


def test_a_socket_of_another_host_is_not_tried(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    peers.address = "ipc:0123456789abcdef/baton " + peers.address.split()[1]
    assert send(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 0
    assert not any("goes over grpc" in line for line in caplog.messages)


def test_a_link_that_broke_is_followed_by_one_over_grpc(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert send(peers, 1) == "ipc"
    cut(peers)
    assert send(peers, 2) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    assert any("goes over grpc" in line for line in caplog.messages)
    cut(peers)
    assert send(peers, 3) == "ipc"
    assert peers.sender.counters.link_fallbacks == 1


def test_ends_that_do_not_fit_are_told_so_over_the_first_way(peers: Peers) -> None:
    peers.sender._fingerprint = b"g" * 32
    transfer = peers.begin(1, [1])
    peers.push(transfer, 0, 0, 1)
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.CONFLICT
    assert peers.receiver.counters.links_refused == 1


@pytest.mark.parametrize("transport", ["grpc", "ipc"])
def test_a_sender_that_is_told_one_takes_it(transport: str) -> None:
    connectors = connectors_of(transport, lambda: None)
    peers = make_peers(Shape(), transport="auto", connectors=connectors)
    assert send(peers, 1) == transport
    assert peers.sender.counters.link_fallbacks == 0
    peers.close()


def test_no_way_in_common_is_said_at_once() -> None:
    peers = make_peers(Shape(), transport="ipc", connectors=connectors_of("grpc", lambda: None))
    with pytest.raises(BatonError, match="cannot be reached over grpc") as error:
        peers.begin(1, [1])
    assert error.value.kind is ErrorKind.CONFLICT
    peers.close()


def test_routes_keep_the_receivers_order() -> None:
    both = connectors_of("auto", lambda: None)
    here = address_of("a")
    assert [way.transport for way in routes(f"{here} 10.0.0.1:7", both)] == ["ipc", "grpc"]
    assert [way.transport for way in routes(f"10.0.0.1:7 {here}", both)] == ["grpc", "ipc"]
    assert [way.address for way in routes(f"{here} 10.0.0.1:7", both)] == [here, "10.0.0.1:7"]
    assert [way.address for way in routes("[::1]:7", both)] == ["[::1]:7"]
