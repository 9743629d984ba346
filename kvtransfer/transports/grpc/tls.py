"""TLS of links over gRPC, as the process that opens them provides it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import grpc


class ListenerTls(Protocol):
    """TLS of a listener; `baton.tls.server.ServerTls` is one."""

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the server's credentials for `add_secure_port`."""

    def refusal(self, auth_context: Mapping[str, bytes] | Mapping[str, Iterable[bytes]]) -> str:
        """Says why a peer with this `ServicerContext.auth_context()` is not admitted, or ""."""


class LinkTls(Protocol):
    """TLS of both ends of links."""

    def server(self) -> ListenerTls:
        """TLS of a listener that admits senders."""

    def arguments(self, certificates: Sequence[str]) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials and further options of a channel to a listener that presents one of these certificates,
        in PEM. Raises BatonError where none of them is trusted."""
