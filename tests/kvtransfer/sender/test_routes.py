"""Several routes to one receiver: which is used, and what happens when it breaks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.link_device import LinkDevice
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.link.interfaces import Connector, SenderWire
from kvtransfer.link.settings import WindowSettings
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.sender.events import Acknowledged
from kvtransfer.sender.routes import routes
from kvtransfer.transports.ipc.control import address_of
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.registry import make_connectors, start_listeners
from tests.kvtransfer.support.device_rigs import FakeRig
from tests.kvtransfer.support.fake_device import FakeDevice, Pump
from tests.kvtransfer.support.nccl_transport import WatchedEndpoint
from tests.kvtransfer.support.peers import Peers, Shape, make_peers


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Both ends have all that there is."""
    made = make_peers(Shape(), transport="auto")
    yield made
    made.close()


@pytest.fixture
def misfits() -> Iterator[Peers]:
    """The sender's model is another one."""
    made = make_peers(Shape(), transport="auto", fingerprint=b"g" * 32)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that fell stays where it is, unless a test is about its return."""
    monkeypatch.setattr("kvtransfer.sender.routes.MIN_PAUSE_S", 600.0)
    monkeypatch.setattr("kvtransfer.sender.routes.MAX_PAUSE_S", 600.0)


def fallbacks(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The fields of the log's fallback events."""
    return [record.__dict__ for record in caplog.records if record.getMessage() == "link_fallback"]


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
    return peers.wires[-1]


def cut(peers: Peers) -> None:
    """The link ends under the sender's hands."""
    wire(peers).close()
    peers.run_until(lambda: not peers.sender.links and not peers.receiver.links)


def test_within_a_host_it_is_ipc(peers: Peers) -> None:
    assert send(peers, 1) == "ipc"
    assert [link.transport for link in peers.receiver.links] == ["ipc"]
    assert peers.sender.counters.link_fallbacks == 0


def test_a_socket_that_is_not_there_leaves_grpc(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    peers.endpoints = (Endpoint("ipc", address_of("gone")), peers.endpoints[1])
    assert send(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    (fell,) = fallbacks(caplog)
    assert (fell["transport"], "gone" in fell["reason"]) == ("grpc", True)


def test_a_socket_of_another_host_is_not_tried(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    peers.endpoints = (Endpoint("ipc", "0123456789abcdef/baton"), peers.endpoints[1])
    assert send(peers, 1) == "grpc"
    assert peers.sender.counters.link_fallbacks == 0
    assert fallbacks(caplog) == []


def test_a_link_that_broke_is_followed_by_one_over_grpc(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert send(peers, 1) == "ipc"
    cut(peers)
    assert send(peers, 2) == "grpc"
    assert peers.sender.counters.link_fallbacks == 1
    assert [fell["transport"] for fell in fallbacks(caplog)] == ["grpc"]
    cut(peers)
    assert send(peers, 3) == "ipc"
    assert peers.sender.counters.link_fallbacks == 1


def test_ends_that_do_not_fit_are_refused_over_the_first_route(misfits: Peers) -> None:
    peers = misfits
    transfer = peers.begin(1, [1])
    peers.push(transfer, 0, 0, 1)
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.CONFLICT
    assert peers.receiver.counters.links_refused == 1


def links(device: LinkDevice | None = None) -> NcclEndpoint:
    """A process's NCCL links, over the test double of NCCL."""
    return WatchedEndpoint(device or FakeDevice(Pump(None)))


def both_have_all(monkeypatch: pytest.MonkeyPatch, reported: str = "auto") -> Peers:
    """Ends that have NCCL too, as `auto` may one day; the sender's setting is `reported`."""
    monkeypatch.setattr("kvtransfer.transports.registry.AUTO", ("ipc", "nccl", "grpc"))
    rig = FakeRig(None)

    def ways(wake: Callable[[], None], blocks: DeviceBlocks) -> tuple[Connector, ...]:
        return make_connectors(reported, wake, blocks, links(rig.sender))

    return make_peers(Shape(), transport="auto", rig=rig, ways=ways, nccl=links(rig.receiver))


@pytest.mark.parametrize("transport", ["grpc", "ipc", "nccl"])
def test_a_sender_uses_the_configured_transport(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again when it breaks: there is no other way then."""
    peers = both_have_all(monkeypatch, transport)
    assert [endpoint.transport for endpoint in peers.endpoints] == ["ipc", "nccl", "grpc"]
    assert send(peers, 1) == transport
    cut(peers)
    assert send(peers, 2) == transport
    assert peers.sender.counters.link_fallbacks == 0
    peers.close()


def test_each_link_that_breaks_is_followed_by_one_over_the_next_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first route is used again after the last of them."""
    peers = both_have_all(monkeypatch)
    taken = []
    for transfer in range(1, 6):
        taken.append(send(peers, transfer))
        cut(peers)
    assert taken == ["ipc", "nccl", "grpc", "ipc", "nccl"]
    assert peers.sender.counters.link_fallbacks == 3
    peers.close()


def test_auto_skips_unavailable_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = WindowSettings(4096, 4), 1.0, lambda: None
    monkeypatch.setattr("kvtransfer.transports.registry.AUTO", ("ipc", "nccl", "grpc"))
    here = ListenConfig("127.0.0.1", transport="auto")
    started = start_listeners(here, *bounds)
    monkeypatch.setattr("kvtransfer.transports.registry.STORES_IN_ORDER", False)
    started += start_listeners(replace(here, nccl=links()), *bounds)
    assert [listener.endpoint.transport for listener in started] == ["ipc", "grpc", "nccl", "grpc"]
    for listener in started:
        listener.close()


def test_auto_does_not_use_nccl() -> None:
    """Before it is known to hold: docs/decisions/0015."""
    device = FakeDevice(Pump(None))
    blocks = DeviceBlocks(device, [torch.zeros((4, 64), dtype=torch.uint8)])
    here = make_connectors("auto", lambda: None, blocks, links(device))
    assert [connector.transport for connector in here] == ["ipc", "grpc"]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_an_unavailable_transport_is_refused_at_once(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.registry.STORES_IN_ORDER", False)
    for start in (
        lambda: make_connectors(transport, lambda: None),
        lambda: start_listeners(
            ListenConfig("127.0.0.1", transport=transport), WindowSettings(4096, 4), 1.0, lambda: None
        ),
    ):
        with pytest.raises(BatonError, match=f"transport {transport} needs") as error:
            start()
        assert error.value.kind is ErrorKind.INVALID


def test_a_listener_that_cannot_bind_leaves_none_of_the_others() -> None:
    bounds = WindowSettings(4096, 4), 1.0, lambda: None
    (holds,) = start_listeners(ListenConfig("127.0.0.1"), *bounds)
    port = int(holds.endpoint.address.rpartition(":")[2])
    threads = threading.active_count()
    with pytest.raises(BatonError, match="cannot listen"):
        start_listeners(ListenConfig("127.0.0.1", port, "auto"), *bounds)
    assert threading.active_count() == threads
    holds.close()


def test_no_common_transport_is_reported_at_once() -> None:
    peers = make_peers(Shape(), transport="ipc", connectors=make_connectors("grpc", lambda: None))
    with pytest.raises(BatonError, match="cannot be reached over grpc") as error:
        peers.begin(1, [1])
    assert error.value.kind is ErrorKind.CONFLICT
    peers.close()


def test_routes_keep_the_receivers_order() -> None:
    both = make_connectors("auto", lambda: None)
    ipc, grpc = Endpoint("ipc", address_of("a")), Endpoint("grpc", "10.0.0.1:7")
    for endpoints in ((ipc, grpc), (grpc, ipc), (grpc,)):
        found = routes(endpoints, both)
        assert [route.endpoint for route in found] == list(endpoints)
        assert [route.transport for route in found] == [endpoint.transport for endpoint in endpoints]
