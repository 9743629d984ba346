"""Ports of a worker that other machines reach and that are not encrypted."""

from __future__ import annotations

from baton.base.addresses import is_loopback
from baton.base.errors import BatonError, ErrorKind
from services.common.config.worker import WorkerConfig


def plaintext_ports(config: WorkerConfig) -> list[str]:
    """Names the ports that would be plaintext on an address other than loopback, those for probes and metrics
    excepted.

    NCCL encrypts nothing, so its links are listed even with TLS. Raises BatonError(INVALID) where the
    configuration requires TLS and something that could have it has not.
    """
    if is_loopback(config.bound_host):
        return []
    ports = []
    if config.tls is None:
        ports.append("gRPC")
        if config.receives_handoffs and config.transfer.transport != "ipc":
            ports.append("links over grpc")
    if config.require_tls and ports:
        named = ", ".join(ports)
        raise BatonError(
            ErrorKind.INVALID, f"require_tls: plaintext on {config.bound_host}: {named} (no tls.internal)"
        )
    return [*ports, "links over nccl"] if config.transfer.transport == "nccl" else ports
