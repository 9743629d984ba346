"""TLS of a worker's links: each end needs a certificate of a worker, and a sender takes only those that the
receiver's tickets name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.config.worker import WorkerConfig

if TYPE_CHECKING:
    import grpc

    from baton.tls.mutual import MutualTls, Role
    from baton.tls.server import ServerTls

# The roles whose workers send blocks over links, and those that receive them.
_SENDERS: tuple[Role, ...] = ("prefill", "both")
_RECEIVERS: tuple[Role, ...] = ("decode", "both")


def link_tls(config: WorkerConfig) -> WorkerLinkTls | None:
    """TLS of the links of this worker; None where none is configured. Raises BatonError(INVALID) where its
    files cannot be used."""
    if config.tls is None:
        return None
    from services.common.rpc.mutual_tls import mutual_tls  # `cryptography` takes 50 ms to import

    return WorkerLinkTls(mutual_tls(config.tls, config.role))


class WorkerLinkTls:
    """Implements `kvtransfer.transports.grpc.tls.LinkTls` with a worker's certificates."""

    def __init__(self, tls: MutualTls, hold_s: float | None = None) -> None:
        """`hold_s`: see `baton.tls.renewal`."""
        from baton.tls.renewal import HOLD_S, Renewal

        self._tls = tls
        # A certificate is published by the next ticket, in this process, so it needs no confirmation.
        self._renewal = Renewal(tls.files, hold_s=HOLD_S if hold_s is None else hold_s)

    def certificates(self) -> tuple[str, ...]:
        """Certificate chains of which the listener presents one, for tickets, in PEM."""
        return tuple(chain.pem.decode() for chain in self._renewal.chains())

    def server(self) -> ServerTls:
        return self._tls.server(*_SENDERS, material=self._renewal.material)

    def arguments(self, certificates: Sequence[str]) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        return self._tls.published_peer(certificates, *_RECEIVERS).arguments()
