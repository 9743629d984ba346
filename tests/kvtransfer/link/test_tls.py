"""Links over gRPC with mutual TLS: between workers of the right roles, to certificates of the ticket only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from baton.base.errors import ErrorKind
from baton.tls.mutual import MutualTls, Role
from baton.v1 import transfer_pb2_grpc
from baton.v1.transfer_pb2 import GetChallengeRequest
from kvtransfer.link.interfaces import Connector
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.connector import GrpcConnector
from kvtransfer.transports.grpc.listener import GrpcListener
from services.common.config.tls import InternalTls
from services.worker.engine.startup.link_tls import WorkerLinkTls
from tests.certificates import Authority, Issued, answer_over_tls, client_context, write
from tests.kvtransfer.support.peers import Peers, Shape, make_peers
from tests.kvtransfer.support.tokens import with_token

AUTH = LinkAuth("the secret of this cluster")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def link_tls(config: InternalTls, role: Role) -> WorkerLinkTls:
    files = (config.cert_file, config.key_file, config.ca_file)
    return WorkerLinkTls(MutualTls(*files, config.domain, role, look_every_s=0.0), hold_s=0.0)


@dataclass
class Ends:
    """A receiver of role decode, and what makes senders to it."""

    authority: Authority
    folder: Path
    receiver: WorkerLinkTls
    peers: Peers

    def connector(self, config: InternalTls, role: Role) -> Connector:
        return GrpcConnector(lambda: None, AUTH, link_tls(config, role))

    def presents(self, *certificates: str) -> None:
        """The certificates that the next tickets name."""
        self.peers.endpoints = tuple(replace(one, certificates=certificates) for one in self.peers.endpoints)


def ends_of(authority: Authority, folder: Path, role: Role) -> Ends:
    """A receiver, and a sender of a role."""
    woken = threading.Event()
    receiver = link_tls(authority.internal(folder, "decode"), "decode")
    sender = link_tls(authority.internal(folder, "workers" if role == "both" else role), role)
    settings = ListenerSettings(woken.set, 5.0, 4, AUTH)
    listener = GrpcListener("127.0.0.1", 0, settings, piece_bytes=4096, tls=receiver)
    connectors = [GrpcConnector(woken.set, AUTH, sender)]
    peers = make_peers(Shape(timeout_s=5.0), listener=listener, connectors=connectors, woken=woken, auth=AUTH)
    ends = Ends(authority, folder, receiver, peers)
    ends.presents(*receiver.certificates())
    return ends


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = ends_of(Authority(), tmp_path, "prefill")
    yield made
    made.peers.close()


def sent(peers: Peers, number: int) -> bool:
    peers.send(number, [[1]], [[2]])
    peers.run_until(lambda: number in peers.acknowledged())
    return True


def failed(peers: Peers, number: int) -> str:
    """Returns the reason for which a transfer fails, which is not a matter of the request."""
    peers.send(number, [[1]], [[2]])
    peers.run_until(lambda: number in peers.failures())
    assert peers.failures()[number].kind in (ErrorKind.UNAVAILABLE, ErrorKind.UNAUTHENTICATED)
    assert peers.receiver.counters.links_opened == 0
    return peers.failures()[number].message


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_blocks_come_over_tls(tmp_path: Path, role: Role) -> None:
    ends = ends_of(Authority(), tmp_path, role)
    assert sent(ends.peers, 1)
    ends.peers.close()


@pytest.mark.parametrize("role", ["decode", "router"])
def test_a_role_that_sends_no_blocks_opens_no_link(tmp_path: Path, role: Role) -> None:
    ends = ends_of(Authority(), tmp_path, role)
    failed(ends.peers, 1)
    ends.peers.close()


def test_a_sender_takes_only_certificates_of_the_ticket(ends: Ends) -> None:
    other = ends.authority.of_role("decode")
    for certificates in ((), (other.pem.decode(),), (Authority().of_role("decode").pem.decode(),)):
        ends.presents(*certificates)
        failed(ends.peers, 1 + len(ends.peers.failures()))
    ends.presents(other.pem.decode(), *ends.receiver.certificates())
    assert sent(ends.peers, 9)


STRANGERS: dict[str, Callable[[Authority], Issued | None]] = {
    "none": lambda authority: None,
    "foreign": lambda authority: Authority("authority").of_role("prefill"),
    "expired": lambda authority: authority.of_role("prefill", days=-1),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_get_not_a_byte(ends: Ends, stranger: str) -> None:
    context = client_context(ends.authority.pem, STRANGERS[stranger](ends.authority), ends.folder)
    context.set_alpn_protocols(["h2"])
    assert answer_over_tls(ends.peers.address, context, PREFACE) == b""
    assert answer_over_tls(ends.peers.address, None, PREFACE) == b""
    assert sent(ends.peers, 9)


def test_another_role_with_the_clusters_token_is_refused(ends: Ends) -> None:
    tls = link_tls(ends.authority.internal(ends.folder, "router"), "router")
    credentials, options = tls.arguments(ends.receiver.certificates())
    with grpc.secure_channel(ends.peers.address, credentials, options=options) as channel:
        service = transfer_pb2_grpc.TransferServiceStub(with_token(channel, AUTH))
        with pytest.raises(grpc.RpcError) as refused:
            service.GetChallenge(GetChallengeRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_link_stays_when_certificates_change_and_a_new_one_gets_the_new(ends: Ends) -> None:
    assert sent(ends.peers, 1)
    folder, successor = ends.folder / "decode", Authority("successor")
    write(folder, successor.of_role("decode"), ends.authority.pem + successor.pem)
    sender = ends.folder / "prefill"
    write(sender, successor.of_role("prefill"), ends.authority.pem + successor.pem)
    certificates = ends.receiver.certificates()
    assert len(certificates) == 2
    ends.presents(*certificates)
    assert sent(ends.peers, 2)
    assert ends.peers.receiver.counters.links_opened == 1
    ends.peers.sender.close()
    channel_credentials, options = link_tls(
        InternalTls(
            cert_file=sender / "tls.crt", key_file=sender / "tls.key", ca_file=sender / "ca.crt",
            domain="test.baton.internal",
        ),
        "prefill",
    ).arguments(certificates[:1])  # fmt: skip
    with grpc.secure_channel(ends.peers.address, channel_credentials, options=options) as channel:
        service = transfer_pb2_grpc.TransferServiceStub(with_token(channel, AUTH))
        assert service.GetChallenge(GetChallengeRequest(), timeout=5).challenge
