"""TLS of the check's two clients, from one configuration."""

from __future__ import annotations

import ssl
from pathlib import Path

from baton.client.tls import Tls
from services.cli.common.config_file import invalid
from services.common.config.check import CheckTls


def http_context(tls: CheckTls) -> ssl.SSLContext:
    """For HTTPS. Raises `BatonError(INVALID)` where a file is unusable."""
    context = ssl.create_default_context(cafile=_authorities(tls))
    if tls.cert_file is not None and tls.key_file is not None:
        _read(tls.cert_file)
        _read(tls.key_file)
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except ssl.SSLError:
            raise invalid(f"tls: {tls.cert_file} and {tls.key_file} are no certificate and its key") from None
    return context


def client_tls(tls: CheckTls) -> Tls:
    """The TLS settings of a gRPC channel."""
    return Tls(_authorities(tls), tls.cert_file, tls.key_file, tls.server_name)


def _authorities(tls: CheckTls) -> Path | None:
    return tls.ca_file if tls.ca_file is not None and tls.ca_file.exists() else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}") from None
