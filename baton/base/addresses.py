"""Addresses as text: `host:port`, with brackets around an IPv6 host."""

from __future__ import annotations

import functools
import ipaddress
import socket

ANY_IPV6, ANY_IPV4 = "::", "0.0.0.0"


def join_address(host: str, port: int) -> str:
    """`host:port`; `host` is a name or an address, an IPv6 one with or without its brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets, and port. ValueError where there is no port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True if `host`, a name or an address, is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def listening_host(host: str, *, has_ipv6: bool | None = None) -> str:
    """The address to bind for `host`: `::` stands for all addresses of both families, which on a machine
    without IPv6 are those of `0.0.0.0`. `has_ipv6`: None: found out."""
    bare = host.strip("[]")
    return ANY_IPV4 if bare == ANY_IPV6 and not (_has_ipv6() if has_ipv6 is None else has_ipv6) else bare


def listening_family(host: str) -> socket.AddressFamily:
    """The family of the sockets that listen on an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def accept_both_families(bound: socket.socket) -> None:
    """Makes an IPv6 socket that is not bound yet accept callers of IPv4 too, whatever the default is."""
    if bound.family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


@functools.cache
def _has_ipv6() -> bool:
    """True if a socket can be bound to all addresses of IPv6; not with the kernel's `ipv6.disable=1`."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((ANY_IPV6, 0))
    except OSError:
        return False
    return True
