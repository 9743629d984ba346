"""Ports of a worker that other machines reach and that are not encrypted."""

from __future__ import annotations

from collections.abc import Iterator

from baton.addresses import is_loopback
from baton.errors import BatonError, ErrorKind
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log

log = get_log(__name__)


def check_plaintext(config: WorkerConfig) -> None:
    """Logs a warning for each plaintext port that is not on loopback, except those for probes and metrics.

    Raises BatonError(INVALID) where the configuration requires TLS and a port could have it. NCCL encrypts
    nothing, so for its links it is always a warning.
    """
    if is_loopback(config.host):
        return
    ports = list(_plaintext_ports(config))
    if config.require_tls and ports:
        raise BatonError(
            ErrorKind.INVALID,
            f"require_tls: plaintext on {config.host}: {', '.join(ports)} (tls.internal is not configured)",
        )
    if config.transfer.transport == "nccl":
        ports.append("links over nccl")
    for port in ports:
        log.warning("plaintext_port", host=config.host, port=port)


def _plaintext_ports(config: WorkerConfig) -> Iterator[str]:
    if config.tls is not None:
        return
    yield "gRPC"
    if config.role == "decode" and config.transfer.transport in ("auto", "grpc", "nccl"):
        yield "links over grpc"
