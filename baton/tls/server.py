"""Credentials of gRPC servers whose certificates are replaced while they run, and whom they admit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import grpc

from baton.tls.material import Material

_NAMES, _VERSION = "peer_dns", "ssl_tls_version"
_TLS_1_3 = b"TLSv1.3"

# What grpc's stubs say that a context has, and what it has.
AuthContext = Mapping[str, bytes] | Mapping[str, Iterable[bytes]]


class ServerTls:
    """TLS of one server. New connections get the latest certificate and are verified against the latest
    authorities; open ones stay."""

    def __init__(
        self,
        material: Callable[[], Material],
        *,
        client_certificates: bool,
        admitted: Iterable[str] | None = None,
    ) -> None:
        """`material`: what a new connection gets. `client_certificates`: whether a client needs one of its
        authorities. `admitted`: DNS names, one of which it must have, over TLS 1.3; None: any name, from
        TLS 1.2 on."""
        self.material = material
        self._client_certificates = client_certificates
        self._admitted = None if admitted is None else frozenset(name.encode() for name in admitted)

    @property
    def checks_peers(self) -> bool:
        """True if `refusal` has anything to check."""
        return self._admitted is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the server's credentials for `add_secure_port`."""
        fetch = _Fetcher(self)
        return grpc.dynamic_ssl_server_credentials(
            fetch.latest(),
            cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
            require_client_authentication=self._client_certificates,
        )

    def refusal(self, auth_context: AuthContext) -> str:
        """Says why a call over a connection with this `ServicerContext.auth_context()` is not admitted, or
        ""."""
        if self._admitted is None:
            return ""
        if _VERSION not in auth_context:
            return "the TLS version is not known: grpcio 1.85 or later is required"
        # gRPC's client and server always agree on 1.3; the minimum cannot be configured.
        if _values(auth_context, _VERSION) != (_TLS_1_3,):
            return "TLS 1.3 is required"
        if self._admitted.isdisjoint(name.lower() for name in _values(auth_context, _NAMES)):
            return "the certificate is not of a role that is admitted here"
        return ""


def _values(auth_context: AuthContext, key: str) -> tuple[bytes, ...]:
    return tuple(cast("Iterable[bytes]", auth_context.get(key, ())))


class _Fetcher:
    """Called by gRPC in each handshake; None means that nothing has changed."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._served: Material | None = None

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            return None if self._tls.material() == self._served else self.latest()

    def latest(self) -> grpc.ServerCertificateConfiguration:
        material = self._tls.material()
        self._served = material
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.chain.pem)], root_certificates=material.authorities or None
        )
