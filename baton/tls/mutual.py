"""Mutual TLS of one member of a cluster, whose certificate has the DNS name of its role in a domain.

    router.DOMAIN  supervisor.DOMAIN  prefill.DOMAIN  decode.DOMAIN
    workers.DOMAIN  a worker of any role

Peers are called by address. So a caller expects the name of the role that it calls, whatever the address, and
takes only the certificates that the peer has published, where it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.base.structured_logs import structlog
from baton.tls.files import LOOK_EVERY_S, TlsFiles
from baton.tls.material import Chain, Material, parse_chain
from baton.tls.server import ServerTls
from baton.tls.trust import verify

Role = Literal["router", "supervisor", "prefill", "decode", "both"]
_NAME_OVERRIDE = "grpc.ssl_target_name_override"
# Certificates that a peer may have published: the presented one and its successor.
_MAX_PUBLISHED = 4
_MAX_CHAIN_BYTES = 16 * 1024

_log = structlog.get_logger(part="tls")


class MutualTls:
    """Credentials of one process for mutual TLS."""

    def __init__(
        self,
        cert_file: Path,
        key_file: Path,
        ca_file: Path,
        domain: str,
        role: Role,
        *,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """Raises BatonError(INVALID), in one line, where a file cannot be used or the certificate is not one
        of the role that leads to an authority in `ca_file`."""
        self._domain = domain
        self._own = self.names(role)
        self.files = TlsFiles(
            cert_file,
            key_file,
            ca_file,
            check=lambda material: _verify_own(material, self._own),
            look_every_s=look_every_s,
        )

    def names(self, *roles: Role) -> tuple[str, ...]:
        """The DNS names of which a certificate of one of these roles has at least one."""
        names = {f"{role}.{self._domain}": None for role in roles if role != "both"}
        if not {"prefill", "decode", "both"}.isdisjoint(roles):
            names[f"workers.{self._domain}"] = None
        return tuple(names)

    def server(self, *roles: Role, material: Callable[[], Material] | None = None) -> ServerTls:
        """TLS of a server that admits peers of these roles. `material`: what it presents; None: the latest
        certificate at once."""
        return ServerTls(
            material or self.files.current, client_certificates=True, admitted=self.names(*roles)
        )

    def trusted(self, published: Iterable[str], *roles: Role) -> tuple[Chain, ...]:
        """The chains among `published`, in PEM, that lead to an authority, are valid now and are of one of
        these roles."""
        authorities, trusted = self.files.current().authorities, []
        for pem in list(published)[:_MAX_PUBLISHED]:
            try:
                if len(pem) > _MAX_CHAIN_BYTES:
                    raise ValueError("the chain is too long")
                chain = parse_chain(pem.encode())
                verify(chain, authorities, _name_in(chain, self.names(*roles)))
            except ValueError as error:
                _log.debug("certificate_not_trusted", reason=str(error))
            else:
                trusted.append(chain)
        return tuple(trusted)

    def peer(self, *roles: Role, chains: Sequence[Chain] = ()) -> PeerTls:
        """Returns the TLS of calls to a peer of one of these roles. `chains`: its certificates, which were
        verified by `trusted`, of which it must present one; empty: it may present any of its role."""
        return PeerTls(self.files, self.names(*roles), tuple(chains))

    def twin(self) -> PeerTls:
        """Returns the TLS of calls to a process that has this one's certificate files."""
        return PeerTls(self.files, (_name_in(self.files.current().chain, self._own),), ())

    def published_peer(self, published: Sequence[str], *roles: Role) -> PeerTls:
        """Returns the TLS of calls to a peer that published these certificates, in PEM. Raises
        BatonError(UNAUTHENTICATED) if none of them is trusted."""
        chains = self.trusted(published, *roles)
        if not chains:
            raise BatonError(ErrorKind.UNAUTHENTICATED, "the peer has published no certificate of its role")
        return self.peer(*roles, chains=chains)


class PeerTls:
    """The TLS connections to one peer. Equal ones lead to equal credentials."""

    def __init__(self, files: TlsFiles, names: tuple[str, ...], chains: tuple[Chain, ...]) -> None:
        self._files = files
        self._names = names
        self._chains = chains

    def state(self) -> object:
        """Differs where new connections need other credentials."""
        return self._files.current(), self._chains

    def arguments(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials and further options of a channel."""
        own = self._files.current()
        name, roots = self._names[-1], own.authorities
        if self._chains:
            # With a leaf as trust anchor BoringSSL, as gRPC configures it, accepts that certificate alone;
            # that it leads to an authority was verified before.
            name = _name_in(self._chains[0], self._names)
            roots = b"".join(chain.leaf_pem for chain in self._chains if name in chain.dns_names)
        credentials = grpc.ssl_channel_credentials(roots, own.key, own.chain.pem)
        return credentials, [(_NAME_OVERRIDE, name)]


def _verify_own(material: Material, names: Sequence[str]) -> None:
    verify(material.chain, material.authorities, _name_in(material.chain, names))


def _name_in(chain: Chain, names: Sequence[str]) -> str:
    """The first of `names` that the certificate has. Raises ValueError where it has none of them."""
    for name in names:
        if name in chain.dns_names:
            return name
    raise ValueError(f"the certificate has none of the names {', '.join(names)}")
