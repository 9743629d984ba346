"""Peers without the cluster's secret get no link, no memory and no thread, over any transport."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1 import transfer_pb2_grpc
from baton.v1.transfer_pb2 import GetChallengeRequest, OpenLinkResponse, SignedOpenLinkRequest
from kvtransfer.protocol.frames import StopAck, encode
from kvtransfer.protocol.handshake import link_request
from kvtransfer.protocol.link_auth import LIFETIME_S, Challenges, LinkAuth
from kvtransfer.sender.events import Failed, SenderEvent
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.grpc.stream import LINK_ID_KEY, STREAM_METHOD
from kvtransfer.transports.ipc.control import VERSION, receive_message, send_message, socket_name
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.peers import (
    FINGERPRINT,
    FakeClock,
    Peers,
    Shape,
    identity,
    make_peers,
    make_sender,
)
from tests.kvtransfer.support.tokens import with_token

SECRET = "the secret of this cluster"
OURS, THEIRS, NONE = LinkAuth(SECRET), LinkAuth("the secret of another one"), LinkAuth()
REQUEST = link_request(identity("prefill-0"), identity("receiver").incarnation, FINGERPRINT, 1)
TRANSPORTS = ("grpc", "ipc")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def peers_of(transport: str, receiver: LinkAuth, sender: LinkAuth) -> Peers:
    connectors = make_connectors(transport, lambda: None, auth=sender)
    return make_peers(Shape(timeout_s=5.0), transport=transport, connectors=connectors, auth=receiver)


@pytest.fixture
def ours(transport: str) -> Iterator[Peers]:
    made = peers_of(transport, OURS, OURS)
    yield made
    made.close()


def code_of(call: grpc.Call) -> grpc.StatusCode:
    return call.code()


def untouched(peers: Peers) -> bool:
    """The loop was not even asked, and a member of the cluster is served as ever."""
    counters = peers.receiver.counters
    assert (counters.links_opened, counters.links_refused, peers.receiver.links) == (0, 0, [])
    peers.send(9, [[1]], [[2]])
    peers.run_until(lambda: peers.acknowledged() == [9])
    return True


@pytest.mark.parametrize(("receiver", "sender"), [(OURS, THEIRS), (OURS, NONE), (NONE, OURS)])
def test_two_secrets_make_no_link(transport: str, receiver: LinkAuth, sender: LinkAuth) -> None:
    peers = peers_of(transport, receiver, sender)
    peers.send(1, [[1]], [[2]])
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.UNAVAILABLE
    assert "secret" in peers.failures()[1].message
    assert (peers.receiver.counters.links_opened, peers.receiver.counters.links_refused) == (0, 0)
    peers.close()


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_every_method_of_the_port_needs_the_token(ours: Peers) -> None:
    with grpc.insecure_channel(ours.address) as channel:
        for strange in (channel, with_token(channel, THEIRS), with_token(channel, NONE)):
            service = transfer_pb2_grpc.TransferServiceStub(strange)
            with pytest.raises(grpc.RpcError) as refused:
                service.GetChallenge(GetChallengeRequest(), timeout=5)
            assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[arg-type]
            with pytest.raises(grpc.RpcError) as refused:
                service.SignedOpenLink(OURS.hello(REQUEST, b""), timeout=5)
            assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[arg-type]
            frames = strange.stream_stream(STREAM_METHOD, None, None)
            with pytest.raises(grpc.RpcError) as refused:
                list(frames(iter([encode(StopAck(1))]), timeout=5, metadata=((LINK_ID_KEY, "1"),)))
            assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[arg-type]
    assert untouched(ours)


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_a_hello_over_grpc_is_valid_once(ours: Peers) -> None:
    with grpc.insecure_channel(ours.address) as channel:
        service = transfer_pb2_grpc.TransferServiceStub(with_token(channel, OURS))

        def refused(hello: SignedOpenLinkRequest) -> bool:
            call = service.SignedOpenLink.future(hello, timeout=5)
            while not call.done():
                ours.step()
            return call.code() is grpc.StatusCode.UNAUTHENTICATED

        challenge = service.GetChallenge(GetChallengeRequest(), timeout=5).challenge
        assert refused(THEIRS.hello(REQUEST, challenge))
        right = OURS.hello(REQUEST, challenge)
        other = SignedOpenLinkRequest(
            request=right.request + b"x", challenge=challenge, nonce=right.nonce, proof=right.proof
        )
        assert refused(other)
        assert ours.receiver.counters.links_opened == 0
        assert not refused(right)
        assert refused(right)
        assert ours.receiver.counters.links_opened == 1


@pytest.mark.parametrize("transport", ["ipc"], indirect=True)
def test_a_hello_over_ipc_is_valid_once_and_memory_follows_it(ours: Peers) -> None:
    replayed = b""
    for auth in (THEIRS, NONE, OURS, None):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(socket_name(ours.address))
            _, greeting, descriptor = receive_message(sock, 5.0)
            assert descriptor is None
            if auth is not None:
                replayed = auth.hello(REQUEST, greeting.removeprefix(VERSION)).SerializeToString()
            send_message(sock, 0, replayed)
            kind, _, descriptor = receive_message(sock, 5.0)
            if auth is OURS:
                assert (kind, descriptor is None) == (0, False)
                socket.close(descriptor)  # type: ignore[arg-type]
            else:
                assert (kind, descriptor) == (ErrorKind.UNAUTHENTICATED.value, None)
    assert untouched(ours)


def test_challenges_are_valid_once_for_seconds_at_their_listener() -> None:
    clock = FakeClock()
    ours, others = Challenges(clock), Challenges(clock)
    first, second, third = ours.issue(), ours.issue(), ours.issue()
    assert not others.redeem(first)
    assert ours.redeem(first)
    assert not ours.redeem(first)
    clock.now += LIFETIME_S - 0.1
    assert ours.redeem(second)
    clock.now += 0.2
    assert not ours.redeem(third)
    assert not ours.redeem(second)
    for wrong in (b"", first[:-1], bytes(len(first)), third[:8] + first[8:]):
        assert not ours.redeem(wrong)


def test_an_answer_proves_its_hello_alone() -> None:
    hello, other = OURS.hello(REQUEST, b"challenge"), OURS.hello(REQUEST, b"challenge")
    answer = OURS.answer(hello, OpenLinkResponse(link_id=7))
    assert OURS.verify_answer(hello, answer).link_id == 7
    for wrong in (OURS.answer(other, OpenLinkResponse(link_id=7)), THEIRS.answer(hello, OpenLinkResponse())):
        with pytest.raises(BatonError) as refused:
            OURS.verify_answer(hello, wrong)
        assert refused.value.kind is ErrorKind.UNAUTHENTICATED
    with pytest.raises(BatonError):
        OURS.verify_probe(hello, OURS.probe_proof(other))
    OURS.verify_probe(hello, OURS.probe_proof(hello))


def pushed_without_a_ticket(ours: Peers, transport: str) -> Sender:
    """A member of the cluster that has no right ticket for transfer 1, and sends its bytes all the same."""
    thief = make_sender(
        ours.shape,
        ours.source,
        lambda: None,
        time.monotonic,
        make_connectors(transport, lambda: None, auth=OURS),
        own=identity("thief"),
    )
    ticket, body = ours.ticket(1, [2])
    ticket.signature = bytes(32)
    ours.push_all(thief.begin(ticket, body), [[5, 6]])
    return thief


def test_bytes_without_a_ticket_bind_nothing(ours: Peers, transport: str) -> None:
    """The transfer's own bytes come later, and it goes on as if the others had not come."""
    ours.expect(1, [[1, 2]])
    thief = pushed_without_a_ticket(ours, transport)
    failed: list[SenderEvent] = []
    deadline = time.monotonic() + 5
    while not failed and time.monotonic() < deadline:
        failed += thief.poll(4)
        ours.step()
    assert [event.error.kind for event in failed if isinstance(event, Failed)] == [ErrorKind.FORBIDDEN]
    assert ours.arrived() == []
    assert ours.sink.scattered == []
    transfer = ours.begin(1, [2])
    ours.push_all(transfer, [[7, 8]])
    transfer.commit(ours.record(transfer))
    ours.run_until(lambda: ours.acknowledged() == [1])
    assert ours.equal([[7, 8]], [[1, 2]])
    thief.close()
