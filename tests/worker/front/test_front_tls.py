"""A worker with TLS registers its certificates before it presents them, and refuses unusable files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from baton.base.cluster_auth import CertificateProof
from baton.state.embedded import EmbeddedServer
from baton.tls.mutual import MutualTls
from baton.tls.renewal import Renewal
from services.common.config.router import RouterConfig
from services.common.config.state import StateConfig
from services.common.config.tls import InternalTls
from services.common.config.worker import WorkerConfig
from services.common.rpc import mutual_tls as rpc_tls
from services.worker.front import front_tls
from services.worker.front.front_tls import FrontTls
from services.worker.front.registration import Registration
from tests.certificates import Authority, write
from tests.state.opened import open_state
from tests.support.waiting import until
from tests.worker.front.test_registration import Served, enter

SECRET = "the secret of this cluster"


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    started = await EmbeddedServer.start()
    yield started
    await started.stop()


def worker_config(tls: InternalTls, state: StateConfig | None = None) -> WorkerConfig:
    return WorkerConfig(
        name="decode-0", role="decode", model="/m", cluster_secret=SECRET, tls=tls, state=state
    )


async def test_a_renewed_certificate_is_registered_beside_the_old_and_then_presented(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_tls, "Renewal", partial(Renewal, hold_s=0.0))
    monkeypatch.setattr(rpc_tls, "MutualTls", lambda *files: MutualTls(*files, look_every_s=0.0))
    authority = Authority()
    files = authority.internal(tmp_path, "decode")
    state = StateConfig(redis_url=server.url, namespace="ours")
    config = worker_config(files, state)
    tls = FrontTls(config, files, look_every_s=0.02)
    worker, reader = Registration(config, state, tls), await open_state(server.url, namespace="ours")
    enter(worker, Served())
    first = files.cert_file.read_text()

    async def registered(*certificates: str) -> bool:
        entries = (await reader.registry.listing()).entries
        if not entries:
            return False
        member = entries[0].member
        proof = CertificateProof(SECRET)
        assert proof.verify(member.certificates_proof, member.name, member.incarnation, member.certificates)
        return member.certificates == certificates

    await until(lambda: registered(first))
    assert worker.registered
    issued = authority.of_role("decode")
    write(files.cert_file.parent, issued, authority.pem)
    assert tls.server.material().chain.pem.decode() == first
    second = issued.pem.decode()
    await until(lambda: registered(second, first))

    async def presented() -> bool:
        return tls.server.material().chain.pem.decode() == second

    await until(presented)
    await worker.close()
    await reader.close()


@pytest.mark.parametrize("program", ["services.worker", "services.router"])
def test_a_wrong_key_file_is_refused_in_one_line_with_exit_code_2(tmp_path: Path, program: str) -> None:
    authority = Authority()
    files = authority.internal(tmp_path, "workers")
    files.key_file.write_bytes(authority.of_role("workers").key_pem)
    config = worker_config(files)
    document = config.model_dump_json()
    if program == "services.router":
        document = router_document(files)
    run = subprocess.run(
        [sys.executable, "-m", program],
        input=document + "\n", capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    (line,) = run.stdout.splitlines()  # for the parent process, which prints the message
    message = json.loads(line)["error"]["message"]
    assert message.endswith("the private key does not belong to the certificate")
    assert "\n" not in message
    assert "PRIVATE KEY" not in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def router_document(files: InternalTls) -> str:
    """A router's configuration with the demo model."""
    config = RouterConfig(
        model=str(Path(__file__).parents[3] / "baton" / "demo_model"),
        served_model_name="demo",
        http_port=0,
        grpc_port=0,
        tls=files,
    )
    return config.model_dump_json()
