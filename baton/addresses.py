"""Addresses as text: `host:port`, with brackets around an IPv6 host."""

from __future__ import annotations

import ipaddress


def join_address(host: str, port: int) -> str:
    """`host:port`; `host` is a name or an address, an IPv6 one with or without its brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets, and port. ValueError where there is no port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
