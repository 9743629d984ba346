"""TLS of a worker's front: routers and supervisors may call it; its certificates go into the registry.

A process beside it that watches it has its certificate files, so callers of its own role are admitted, too.

A router takes only certificates that it has found in the registry, so a renewed one is presented only after
it was registered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.base.cluster_auth import CertificateProof
from baton.tls.renewal import Renewal
from services.common.rpc.mutual_tls import mutual_tls

if TYPE_CHECKING:
    from baton.state import Lease, Member
    from baton.tls.server import ServerTls
    from services.common.config.tls import InternalTls
    from services.common.config.worker import WorkerConfig

_LOOK_EVERY_S = 5.0


class FrontTls:
    """TLS of one worker's front."""

    def __init__(self, config: WorkerConfig, tls: InternalTls, look_every_s: float = _LOOK_EVERY_S) -> None:
        """`look_every_s`: how often a renewed certificate is looked for. Raises BatonError(INVALID) where a
        file cannot be used."""
        self._look_every_s = look_every_s
        mutual = mutual_tls(tls, config.role)
        self._proof = CertificateProof(config.cluster_secret)
        self._renewal = Renewal(mutual.files, confirmed=config.state is not None)
        self.server: ServerTls = mutual.server(
            "router", "supervisor", config.role, material=self._renewal.material
        )

    def signed(self, member: Member) -> Member:
        """The registry entry with the certificates that this front presents, and will present."""
        certificates = tuple(chain.pem.decode() for chain in self._renewal.chains())
        proof = self._proof.sign(member.name, member.incarnation, certificates)
        return member.model_copy(update={"certificates": certificates, "certificates_proof": proof})

    async def register_renewals(self, lease: Lease) -> None:
        """Registers renewed certificates, until cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            newest = self._renewal.chains()[0]
            signed = self.signed(lease.member)
            if signed.certificates != lease.member.certificates:
                lease.update(signed)
            announced = lease.announced
            if announced is not None and newest.pem.decode() in announced.certificates:
                self._renewal.publish(newest)
