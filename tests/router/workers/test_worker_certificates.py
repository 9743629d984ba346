"""A router calls registered workers over mutual TLS, and takes only the certificates of their entries."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.base.cluster_auth import CertificateProof, secret_name
from baton.state import Member
from baton.state.stores.records import new_incarnation
from baton.tls.mutual import MutualTls
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2 import DescribeRequest
from services.common.config.tls import InternalTls
from services.common.rpc import mutual_tls as rpc_tls
from services.router.workers import directory as directories
from services.router.workers.certificates import WorkerCertificates
from services.router.workers.directory import Directory
from services.router.workers.discovery import Discovery
from tests.certificates import Authority, write
from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.fake_workers import FakeCluster, FakeWorker

SECRET = "the secret of this cluster"
PROOF = CertificateProof(SECRET)


def at_once(config: InternalTls, role: Any) -> MutualTls:
    """TLS that looks at its files at each connection."""
    return MutualTls(config.cert_file, config.key_file, config.ca_file, config.domain, role, look_every_s=0.0)


class Cluster:
    """A fake decode worker with TLS, and a router's directory and discovery."""

    def __init__(self, folder: Path, worker: FakeWorker) -> None:
        self.folder, self.worker, self.authority = folder, worker, Authority()
        self.config = self.authority.internal(folder, "decode")
        self.worker.tls = at_once(self.config, "decode").server("router")
        certificates = WorkerCertificates(
            at_once(self.authority.internal(folder, "router"), "router"), SECRET
        )
        self.directory = Directory((), lambda: None, certificates=certificates)
        self.discovery = Discovery(
            self.directory, "fake", secret=secret_name(SECRET), certificates=certificates
        )

    def entry(self, *certificates: str, secret: str = SECRET, **changed: Any) -> Member:
        """The worker's registry entry; `changed`: fields that someone has changed after it was signed."""
        name, incarnation = "decode-0", new_incarnation()
        signed = Member(
            name=name,
            incarnation=incarnation,
            role="decode",
            model="fake",
            host=socket.gethostname(),
            addresses={"grpc": self.worker.address},
            secret_name=secret_name(SECRET),
            certificates=certificates,
            certificates_proof=CertificateProof(secret).sign(name, incarnation, certificates),
        )
        return signed.model_copy(update=changed)

    @property
    def own(self) -> str:
        return self.config.cert_file.read_text()


@pytest.fixture
async def cluster(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(directories, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(directories, "RETRY_S", 0.02)
    fakes = FakeCluster.like(model_folder)
    made = Cluster(tmp_path, FakeWorker("decode-0", WorkerRole.WORKER_ROLE_DECODE, fakes))
    async with made.worker.serving():
        made.directory.start()
        yield made
        await made.directory.stop()


async def test_a_registered_worker_is_found(cluster: Cluster) -> None:
    cluster.discovery.set_registered([cluster.entry(cluster.own)])
    await until(lambda: len(cluster.directory.workers) == 1)


async def test_an_entry_without_a_trusted_certificate_is_not_called(cluster: Cluster) -> None:
    own, another = cluster.own, cluster.authority.of_role("decode").pem.decode()
    entries = (
        cluster.entry(),
        cluster.entry(own, secret="another secret of a cluster"),
        cluster.entry(own, incarnation=new_incarnation()),
        cluster.entry(own, name="decode-1"),
        cluster.entry(own, certificates=(another,)),
        cluster.entry(Authority().of_role("decode").pem.decode()),
        cluster.entry(cluster.authority.of_role("prefill").pem.decode()),
        cluster.entry(cluster.authority.of_role("decode", days=-1).pem.decode()),
    )
    for entry in entries:
        cluster.discovery.set_registered([entry])
        assert not cluster.directory.peers


async def test_a_worker_with_another_certificate_of_the_cluster_is_not_taken(cluster: Cluster) -> None:
    another = cluster.authority.of_role("decode").pem.decode()
    cluster.discovery.set_registered([cluster.entry(another)])
    peer = cluster.directory.peers[cluster.worker.address]
    with contextlib.suppress(TimeoutError):
        await until(lambda: bool(cluster.directory.workers), 0.3)
    assert not cluster.directory.workers
    cluster.discovery.set_registered([cluster.entry(another, cluster.own)])
    await until(lambda: len(cluster.directory.workers) == 1)
    assert cluster.directory.peers[cluster.worker.address] is peer


async def test_a_renewal_that_is_registered_first_loses_no_worker(cluster: Cluster) -> None:
    entry = cluster.entry(cluster.own)
    cluster.discovery.set_registered([entry])
    await until(lambda: len(cluster.directory.workers) == 1)
    (worker,) = cluster.directory.workers
    for _ in range(3):
        issued = cluster.authority.of_role("decode")
        both = (issued.pem.decode(), cluster.own)
        proof = PROOF.sign(entry.name, entry.incarnation, both)
        entry = entry.model_copy(update={"certificates": both, "certificates_proof": proof})
        cluster.discovery.set_registered([entry])
        write(cluster.config.cert_file.parent, issued, cluster.authority.pem)
        await worker.peer.worker.Describe(DescribeRequest(), timeout=5)
        await until(lambda: worker.reachable)  # a heartbeat may be late on a busy machine
        assert cluster.directory.workers == [worker]
        assert not worker.lost


async def test_a_router_serves_over_mutual_tls_while_certificates_change(
    site: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    monkeypatch.setattr(rpc_tls, "MutualTls", lambda *files: MutualTls(*files, look_every_s=0.0))
    workers, router = authority.internal(tmp_path, "workers"), authority.internal(tmp_path, "router")
    server = at_once(workers, "both").server("router", "supervisor")
    async with site(prefill=2, decode=2, worker_tls=server, tls=router) as here:
        for renewed in (None, workers, router, workers, router):
            if renewed is not None:
                role = "workers" if renewed is workers else "router"
                write(renewed.cert_file.parent, authority.of_role(role), authority.pem)
            for _ in range(5):
                assert len(tokens_of(await here.generate(ids_request([1, 2, 3], max_tokens=8)))) == 8
        assert here.router.directory.token_stream_breaks == 0
        await here.quiet()
