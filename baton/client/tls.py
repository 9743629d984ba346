"""TLS of a client's connection."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.base.errors import BatonError, ErrorKind

Option = tuple[str, int | str]
_NAME_OVERRIDE = "grpc.ssl_target_name_override"


@dataclass(frozen=True)
class Tls:
    """Authorities that the client trusts, and its own certificate if the server wants one. All files are PEM.

    `ca_file`: the server's authorities; None: the system's. `cert_file` and `key_file`: both or neither.
    `server_name`: the DNS name that the server's certificate must have; None: the host of the address.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises BatonError(INVALID) where one cannot be read."""
        if (self.cert_file is None) != (self.key_file is None):
            raise BatonError(ErrorKind.INVALID, "TLS needs a certificate and its key, or neither")
        authorities = _contents(self.ca_file) or _system_authorities()
        return grpc.ssl_channel_credentials(authorities, _contents(self.key_file), _contents(self.cert_file))

    def options(self) -> tuple[Option, ...]:
        """Further options of the channel."""
        return () if self.server_name is None else ((_NAME_OVERRIDE, self.server_name),)


def _system_authorities() -> bytes | None:
    """Without them gRPC would trust a list of its own."""
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode() or None


def _contents(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BatonError(ErrorKind.INVALID, f"TLS: cannot read {path}: {reason}") from error
