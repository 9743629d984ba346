"""Ports of a router that other machines reach and that are not encrypted."""

from __future__ import annotations

from collections.abc import Iterator

from baton.base.addresses import is_loopback
from baton.base.errors import BatonError, ErrorKind
from services.common.config.router import RouterConfig
from services.common.observability.logs import get_log

_log = get_log("router")


def check_plaintext(config: RouterConfig) -> None:
    """Logs a warning for each plaintext port that is not on loopback; for the admin HTTP port only where it
    serves the web page, not probes and metrics alone.

    Raises BatonError(INVALID), which names the ports, where the configuration requires TLS.
    """
    ports = list(_plaintext_ports(config))
    if config.require_tls and ports:
        named = ", ".join(f"{name} on {host} (no {setting})" for name, host, setting in ports)
        raise BatonError(ErrorKind.INVALID, f"require_tls: plaintext: {named}")
    for name, host, setting in ports:
        _log.warning("plaintext_port", port=name, host=host, hint=f"configure {setting}")


def _plaintext_ports(config: RouterConfig) -> Iterator[tuple[str, str, str]]:
    """Name and host of each, and the setting that it lacks."""
    if config.public_tls is None and not is_loopback(config.host):
        yield f"http_port {config.http_port}", config.host, "tls.public"
        yield f"grpc_port {config.grpc_port}", config.host, "tls.public"
    if not is_loopback(config.admin_host):
        yield f"admin_grpc_port {config.admin_ports[0]}", config.admin_host, "an admin_host on loopback"
    if config.serves_ui and not is_loopback(config.bound_admin_http_host):
        yield f"admin_http_port {config.admin_ports[1]}", config.bound_admin_http_host, "ui: false"
