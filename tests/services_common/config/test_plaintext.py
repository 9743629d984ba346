"""Ports of a worker that are plaintext, and settings that are refused where TLS is required."""

from __future__ import annotations

from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.common.config.plaintext import plaintext_ports
from services.common.config.tls import InternalTls
from services.common.config.transfer import TransferConfig
from services.common.config.worker import WorkerConfig

TLS = InternalTls.model_validate({"cert_file": "c", "key_file": "k", "ca_file": "a", "domain": "d"})
IPC, NCCL = TransferConfig(transport="ipc"), TransferConfig(transport="nccl")


def worker(host: str = "10.0.0.1", **fields: Any) -> WorkerConfig:
    return WorkerConfig(name="w", role=fields.pop("role", "decode"), model="m", host=host, **fields)


@pytest.mark.parametrize(
    ("config", "ports"),
    [
        (worker("127.0.0.1", require_tls=True), []),
        (worker(), ["gRPC", "links over grpc"]),
        (worker(role="prefill"), ["gRPC"]),
        (worker(transfer=IPC), ["gRPC"]),
        (worker(tls=TLS, require_tls=True), []),
        (worker(tls=TLS, require_tls=True, transfer=NCCL), ["links over nccl"]),
    ],
)
def test_plaintext_ports(config: WorkerConfig, ports: list[str]) -> None:
    assert plaintext_ports(config) == ports


def test_a_worker_at_loopback_whose_ports_others_reach() -> None:
    assert plaintext_ports(worker(host="127.0.0.1")) == []
    assert "gRPC" in plaintext_ports(worker(host="127.0.0.1", listen_host="::"))


def test_plaintext_is_refused_where_tls_is_required() -> None:
    with pytest.raises(BatonError, match=r"plaintext on .*: gRPC, links over grpc") as refused:
        plaintext_ports(worker(require_tls=True))
    assert refused.value.kind is ErrorKind.INVALID
