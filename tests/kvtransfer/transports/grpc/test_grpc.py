"""Properties of the grpc transport alone: a port, and streams under link ids."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.base.errors import BatonError, ErrorKind
from baton.v1 import transfer_pb2_grpc
from baton.v1.transfer_pb2 import GetChallengeRequest, OpenLinkResponse
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import StopAck, encode
from kvtransfer.protocol.handshake import link_request
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.stream import LINK_ID_KEY, STREAM_METHOD, SendQueue
from kvtransfer.transports.listen_config import ListenConfig
from tests.kvtransfer.support.peers import FINGERPRINT, Peers, Shape, identity, make_peers
from tests.kvtransfer.support.tokens import with_token

AUTH = LinkAuth()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = make_peers(Shape())
    yield made
    made.close()


@contextmanager
def channel(peers: Peers) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(peers.address, options=[("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


def open_link(peers: Peers, over: grpc.Channel, name: str = "raw") -> OpenLinkResponse:
    request = link_request(identity(name), identity("receiver").incarnation, FINGERPRINT, 1)
    receiver, metadata = transfer_pb2_grpc.TransferServiceStub(over), AUTH.token.metadata
    given = receiver.GetChallenge(GetChallengeRequest(), timeout=3, metadata=metadata)
    hello = AUTH.hello(request, given.challenge)
    call = receiver.SignedOpenLink.future(hello, timeout=3, metadata=metadata)
    while not call.done():
        peers.step()
    return AUTH.verify_answer(hello, call.result())


def stream(over: grpc.Channel, link_id: str | None, messages: Iterator[bytes]) -> grpc.Call:
    metadata = AUTH.token.metadata if link_id is None else ((LINK_ID_KEY, link_id), *AUTH.token.metadata)
    raw = over.stream_stream(STREAM_METHOD, request_serializer=None, response_deserializer=None)
    call = raw(messages, metadata=metadata, timeout=5)
    assert isinstance(call, grpc.Call)
    return call


def test_health_and_reflection(peers: Peers) -> None:
    with channel(peers) as over:
        stub = health_pb2_grpc.HealthStub(over)
        for service in ("", "baton.v1.TransferService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=3)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ours = with_token(over, AUTH)
        assert "baton.v1.TransferService" in ProtoReflectionDescriptorDatabase(ours).get_services()


def test_a_port_in_use_is_one_clear_error(peers: Peers) -> None:
    port = int(peers.address.rsplit(":", 1)[1])
    other = make_peers(Shape())
    with pytest.raises(BatonError, match=rf"cannot listen on 127.0.0.1:{port}") as error:
        other.receiver.listen(ListenConfig("127.0.0.1", port))
    assert error.value.kind is ErrorKind.INVALID
    other.close()


@pytest.mark.parametrize("link_id", [None, "", "x", "-1", "12345", "9" * 30, "0x10"])
def test_a_stream_without_a_link_is_refused(peers: Peers, link_id: str | None) -> None:
    with channel(peers) as over:
        call = stream(over, link_id, iter([encode(StopAck(1))]))
        assert call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    peers.step()
    assert not peers.receiver.links


def test_a_link_id_is_valid_for_one_stream(peers: Peers) -> None:
    with channel(peers) as over:
        link_id = str(open_link(peers, over).link_id)
        release = threading.Event()

        def one_message() -> Iterator[bytes]:
            yield encode(StopAck(1))
            release.wait(5)

        first = stream(over, link_id, one_message())
        peers.run_until(lambda: peers.receiver.counters.dropped_unknown == 1)
        second = stream(over, link_id, iter([encode(StopAck(1))]))
        assert second.code() is grpc.StatusCode.FAILED_PRECONDITION
        release.set()
        peers.run_until(lambda: peers.receiver.links == [])
        assert first.code() is not None
        third = stream(over, link_id, iter([encode(StopAck(1))]))
        assert third.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert peers.receiver.counters.links_fenced == 1


@pytest.mark.parametrize("message", [b"", b"nonsense", bytes(48), b"\xff" * 100])
def test_a_malformed_frame_ends_the_stream_with_its_fault(peers: Peers, message: bytes) -> None:
    with channel(peers) as over:
        call = stream(over, str(open_link(peers, over).link_id), _then_wait(message))
        peers.run_until(lambda: peers.receiver.links == [])
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "malformed frame" in str(call.details())
    peers.send(1, [[1]], [[2]])
    peers.run_until(lambda: peers.acknowledged() == [1])
    peers.check_ledger()


def _then_wait(message: bytes) -> Iterator[bytes]:
    yield message
    time.sleep(1)


def test_a_peer_that_reads_nothing_closes_its_queue_not_our_memory() -> None:
    queue = SendQueue(3)
    for _ in range(3):
        queue.add(b"x")
    assert queue.closed is None
    queue.add(b"x")
    assert queue.closed is not None
    assert "does not read" in queue.closed.message
    assert list(queue) == []


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_over_ipv6(peers: Peers, host: str) -> None:
    peers.endpoints = peers.receiver.listen(ListenConfig(host))
    assert peers.address.startswith("[::1]:")
    peers.send(1, [[1]], [[2]])
    peers.run_until(lambda: peers.acknowledged() == [1])


def test_links_come_over_both_families_to_a_listener_at_all_addresses(peers: Peers) -> None:
    """Senders are told the address that is registered."""
    (told,) = peers.receiver.listen(ListenConfig("127.0.0.1", listen_host="::"))
    assert told.address.startswith("127.0.0.1:")
    for count, host in enumerate(("127.0.0.1", "[::1]"), 1):
        peers.endpoints = (Endpoint("grpc", told.address.replace("127.0.0.1", host)),)
        peers.send(count, [[1]], [[2]])
        peers.run_until(lambda count=count: len(peers.acknowledged()) == count)  # type: ignore[misc]


def test_a_fixed_port_is_the_one_that_tickets_name(peers: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert peers.receiver.listen(ListenConfig("127.0.0.1", port)) == (Endpoint("grpc", f"127.0.0.1:{port}"),)


def test_no_listener() -> None:
    peers = make_peers(Shape(timeout_s=2.0))
    peers.endpoints = (Endpoint("grpc", "127.0.0.1:9"),)
    transfer = peers.begin(1, [1])
    peers.push(transfer, 0, 0, 1)
    began = time.monotonic()
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
    assert time.monotonic() - began < 1.5
    assert not peers.source.pins
    peers.close()


def test_close_ends_every_thread() -> None:
    before = set(threading.enumerate())
    peers = make_peers(Shape())
    peers.send(1, [[1]], [[1]])
    peers.run_until(lambda: peers.acknowledged() == [1])
    peers.close()
    deadline = time.monotonic() + 2
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, set(threading.enumerate()) - before
        time.sleep(0.01)
