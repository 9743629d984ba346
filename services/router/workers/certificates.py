"""Binds each worker to the certificates that it may present, by the registry entries.

An entry is authenticated by the cluster's secret, so a certificate is bound to the worker's name and
incarnation: another member of the cluster that answers at that address is not taken for it. A worker that is
not in the registry, since this router's parent process named it, may present any certificate with the name
`workers.DOMAIN`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import grpc

from baton.base.cluster_auth import CertificateProof
from baton.state import Member
from services.common.config.router import RouterConfig
from services.common.observability.logs import get_log

if TYPE_CHECKING:
    from baton.tls.material import Chain
    from baton.tls.mutual import MutualTls, PeerTls, Role

_ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# What a worker published, as it is cached: incarnation and certificates.
_Published = tuple[str, tuple[str, ...]]

_log = get_log("certificates")


class WorkerCertificates:
    """The certificates of the registered workers, by address."""

    def __init__(self, tls: MutualTls, cluster_secret: str) -> None:
        self._tls = tls
        self._proof = CertificateProof(cluster_secret)
        # What was published, and what of it is trusted.
        self._trusted: dict[_Published, tuple[Chain, ...]] = {}
        # The trusted certificates at each address.
        self._chains: dict[str, tuple[Chain, ...]] = {}
        self._channels: dict[str, WorkerTls] = {}

    def set_registered(self, members: Iterable[Member]) -> None:
        """Replaces what the registered workers have published."""
        trusted: dict[_Published, tuple[Chain, ...]] = {}
        chains: dict[str, tuple[Chain, ...]] = {}
        for member in members:
            key = (member.incarnation, member.certificates)
            found = self._trusted.get(key)
            trusted[key] = found if found is not None else self._verify(member)
            if (address := member.addresses.get("grpc")) is not None:
                chains[address] = (*trusted[key], *chains.get(address, ()))
        self._trusted = trusted
        self._chains = chains
        for address, channel in self._channels.items():
            # One that is not registered any more may still answer, with the certificate that it had.
            if chains.get(address):
                channel.update(self._peer(address))

    def presents(self, member: Member) -> bool:
        """True if the worker has published a certificate that is trusted."""
        return bool(self._trusted.get((member.incarnation, member.certificates)))

    def channel(self, address: str) -> WorkerTls:
        """Returns the TLS of calls to the worker at an address."""
        if address not in self._channels:
            self._channels[address] = WorkerTls(self._peer(address))
        return self._channels[address]

    def forget(self, address: str) -> None:
        """Forgets an address that is not called any more."""
        self._channels.pop(address, None)

    def _peer(self, address: str) -> PeerTls:
        return self._tls.peer(*_ROLES, chains=self._chains.get(address, ()))

    def _verify(self, member: Member) -> tuple[Chain, ...]:
        chains: tuple[Chain, ...] = ()
        right = self._proof.verify(
            member.certificates_proof, member.name, member.incarnation, member.certificates
        )
        if right and member.role in _ROLES:
            chains = self._tls.trusted(member.certificates, cast("Role", member.role))
        if not chains:
            _log.warning("worker_certificate_refused", worker=member.name, published=len(member.certificates))
        return chains


class WorkerTls:
    """A `ChannelTls` of one address, whose certificates change with the registry."""

    def __init__(self, peer: PeerTls) -> None:
        self._peer = peer

    def update(self, peer: PeerTls) -> None:
        """Replaces the certificates that the worker may present."""
        self._peer = peer

    def state(self) -> object:
        return self._peer.state()

    def arguments(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        return self._peer.arguments()


def configured_certificates(config: RouterConfig) -> WorkerCertificates | None:
    """Returns the certificates that workers may present; None without TLS. Raises BatonError(INVALID) if a
    file cannot be used."""
    if config.tls is None:
        return None
    from services.common.rpc.mutual_tls import mutual_tls  # `cryptography` takes 50 ms to import

    return WorkerCertificates(mutual_tls(config.tls, "router"), config.cluster_secret)
