"""TLS of the public ports, as `tls.public` configures it."""

from __future__ import annotations

from baton.tls.files import LOOK_EVERY_S, TlsFiles
from baton.tls.server import ServerTls
from services.common.config.tls import PublicTls


def public_tls_files(config: PublicTls) -> TlsFiles:
    """The files, read again when they change. Raises BatonError(INVALID) where one cannot be used."""
    return TlsFiles(config.cert_file, config.key_file, config.client_ca_file, look_every_s=LOOK_EVERY_S)


def public_grpc_tls(config: PublicTls, files: TlsFiles) -> ServerTls:
    """TLS of a public gRPC port: versions 1.2 and 1.3; clients need a certificate where `client_ca_file` is
    configured."""
    return ServerTls(files.current, client_certificates=config.client_ca_file is not None)
