"""Limits on the open HTTP connections of one listener, and which one is closed for a new one.

A connection without a running request may be closed for a newer one. It is taken from the address with the
most connections, so a client that opens many displaces only its own. If every connection has a running
request, a new one is put into a small reserve, where only health checks are served and everything else gets
an error.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Protocol

from services.common.config.router import ConnectionLimits

# Connections above the limit, each for one short response.
RESERVE = 32
# A connection that has waited for less probably has a request on the way.
_EVICTABLE_AFTER_S = 1.0
_V6_NETWORK_BITS = 64
_MIB = 1024 * 1024


class Connection(Protocol):
    """The part of a connection that the limits need. `address`: see `client_address`."""

    address: str
    # Bytes of a body that has not arrived completely.
    buffered: int

    def evict(self, message: str) -> None:
        """Closes it, with an error response if a request has begun to arrive."""
        ...


class Connections:
    """Counts the connections of one listener. `now` is the event loop's clock, in seconds."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._max = limits.max_connections
        self._share = max(1, limits.max_connections_per_address or self._max // 2)
        # Address → its connections, each with the time since which it waits; None while its request runs.
        self._open: dict[str, dict[Connection, float | None]] = {}
        self._reserve: dict[Connection, None] = {}
        self._count = 0
        self._buffered = 0
        # Set when the listener is about to stop: each response says that its connection ends, and new
        # connections are served health checks only.
        self.leaving = False
        # Connections that were refused or closed by a limit, by reason.
        self.refused: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Open connections, including the reserve."""
        return self._count + len(self._reserve)

    @property
    def running(self) -> bool:
        """True if any connection's request runs."""
        return any(since is None for mine in self._open.values() for since in mine.values())

    @property
    def idle(self) -> bool:
        """True if any connection waits for a request."""
        return any(since is not None for mine in self._open.values() for since in mine.values())

    def admit(self, connection: Connection, now: float) -> bool:
        """Counts a new connection, closing another one if necessary. False if it is in the reserve."""
        mine = self._open.get(connection.address, {})
        fits = True
        if len(mine) >= self._share:
            fits = self._evict_from(connection.address, now)
        elif self._count >= self._max:
            fits = self._evict_any(now)
        if fits:
            self._open.setdefault(connection.address, {})[connection] = now
            self._count += 1
        else:
            if len(self._reserve) >= RESERVE:
                oldest = next(iter(self._reserve))
                self.remove(oldest)
                oldest.evict("too many connections")
            self._reserve[connection] = None
        return fits

    def set_running(self, connection: Connection, *, running: bool, now: float) -> None:
        """Records that the connection's request runs, or that it waits for one from now on."""
        mine = self._open.get(connection.address, {})
        if connection in mine:
            del mine[connection]
            mine[connection] = None if running else now

    def remove(self, connection: Connection) -> None:
        """Removes a connection; a second call does nothing."""
        self.set_buffered(connection, 0)
        self._reserve.pop(connection, None)
        mine = self._open.get(connection.address)
        if mine is not None and connection in mine:
            del mine[connection]
            self._count -= 1
            if not mine:
                del self._open[connection.address]

    def set_buffered(self, connection: Connection, size: int) -> None:
        """Records how much of a body has arrived. Above the limit, the connection with the most is closed."""
        self._buffered += size - connection.buffered
        connection.buffered = size
        while self._buffered > self.limits.max_buffered_body_mb * _MIB:
            largest = max((one for mine in self._open.values() for one in mine), key=lambda one: one.buffered)
            self.remove(largest)
            largest.evict("too many request bodies are arriving")

    def _evict_from(self, address: str, now: float) -> bool:
        """Closes the address's connection that has waited longest for a request; False if none may be."""
        for connection, since in self._open[address].items():
            if since is not None:
                if now - since < _EVICTABLE_AFTER_S:
                    return False  # the rest are younger
                self.remove(connection)
                connection.evict("too many connections")
                return True
        return False

    def _evict_any(self, now: float) -> bool:
        by_count = sorted(self._open, key=lambda address: len(self._open[address]), reverse=True)
        return any(self._evict_from(address, now) for address in by_count)


def client_address(peer: tuple[str, int] | None) -> str:
    """The key of the limit per client: the IPv4 address, or the /64 network of an IPv6 address."""
    if peer is None:
        return ""
    host = peer[0].partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _V6_NETWORK_BITS), strict=False))
