"""Open HTTP connections of one listener: their number, their addresses, and who is closed for a new one.

A connection that waits for a request, or for the rest of one, may be closed for a newer one. The address
with the most connections gives one up, so that a client that opens many displaces only itself. Where every
connection has a request that runs, a new one goes to a small reserve, which answers health checks and
refuses the rest: whoever connects gets an answer.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.common.config.connection_limits import ConnectionLimits

# Connections above the limit, each for one short answer.
RESERVE = 32
# A connection just opened has its request on the way.
_EVICTABLE_AFTER_S = 1.0
_V6_NETWORK_BITS = 64
_MIB = 1024 * 1024


class Connection(Protocol):
    """What is counted here."""

    address: str
    # Bytes of a body that has not arrived in full.
    buffered: int

    def evict(self, message: str) -> None:
        """Closes it, with an error where a request has begun to arrive."""
        ...


class Connections:
    """The book of one listener. `now` is the event loop's clock, in seconds."""

    def __init__(self, limits: ConnectionLimits, most: int | None = None) -> None:
        """`most`: what the process has descriptors for; unset: as the limits say."""
        self.limits = limits
        self._most = limits.max_connections if most is None else most
        self._share = max(1, limits.max_connections_per_address or self._most // 2)
        # Address → its connections, each with the time since when it may be closed; None: its request runs.
        self._open: dict[str, dict[Connection, float | None]] = {}
        self._reserve: dict[Connection, None] = {}
        self._count = 0
        self._buffered = 0
        # Connections that were refused or closed, by reason.
        self.refused: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Open connections, the reserve included."""
        return self._count + len(self._reserve)

    def admit(self, connection: Connection, now: float) -> bool:
        """Counts a new connection, if need be in place of another; False where it is in the reserve."""
        mine = self._open.get(connection.address, {})
        fits = True
        if len(mine) >= self._share:
            fits = self._evict_from(connection.address, now)
        elif self._count >= self._most:
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
        """Notes that its request runs, or that it waits for one from now on. It moves to the end."""
        mine = self._open.get(connection.address, {})
        if connection in mine:
            del mine[connection]
            mine[connection] = None if running else now

    def remove(self, connection: Connection) -> None:
        """Forgets a connection; a second call does nothing."""
        self.set_buffered(connection, 0)
        self._reserve.pop(connection, None)
        mine = self._open.get(connection.address)
        if mine is not None and connection in mine:
            del mine[connection]
            self._count -= 1
            if not mine:
                del self._open[connection.address]

    def set_buffered(self, connection: Connection, size: int) -> None:
        """Notes how much of a body has arrived. Above the limit the one with the most is closed."""
        self._buffered += size - connection.buffered
        connection.buffered = size
        while self._buffered > self.limits.max_buffered_body_mb * _MIB:
            largest = max((one for mine in self._open.values() for one in mine), key=lambda one: one.buffered)
            self.remove(largest)
            largest.evict("too many request bodies are arriving")

    def _evict_from(self, address: str, now: float) -> bool:
        """Closes the address's connection that has waited longest; False where none may be closed."""
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
    """What connections are counted by: the IPv4 address, or the /64 network of an IPv6 one."""
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
