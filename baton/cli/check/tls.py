"""TLS of the check's two clients, from one configuration."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from baton.cli.common.config_file import invalid
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


def grpc_credentials(tls: CheckTls) -> grpc.ChannelCredentials:
    """For gRPC. Raises `BatonError(INVALID)` where a file is unusable."""
    path = _authorities(tls)
    if path is not None:
        roots = _read(path)
    else:  # without, gRPC would trust a list of its own
        system = ssl.create_default_context().get_ca_certs(binary_form=True)
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, system)).encode()
    return grpc.ssl_channel_credentials(
        root_certificates=roots or None,
        private_key=_read(tls.key_file) if tls.key_file else None,
        certificate_chain=_read(tls.cert_file) if tls.cert_file else None,
    )


def _authorities(tls: CheckTls) -> Path | None:
    return tls.ca_file if tls.ca_file is not None and tls.ca_file.exists() else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}") from None
