"""Mutual TLS as `tls.internal` configures it."""

from __future__ import annotations

from baton.tls.mutual import MutualTls, Role
from services.common.config.tls import InternalTls


def mutual_tls(config: InternalTls, role: Role) -> MutualTls:
    """TLS of a process of this role. Raises BatonError(INVALID) where its files cannot be used."""
    return MutualTls(config.cert_file, config.key_file, config.ca_file, config.domain, role)
