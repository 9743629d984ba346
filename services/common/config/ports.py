"""Ports of several workers of one host: the first is configured, each further worker has the next."""

from __future__ import annotations

from collections.abc import Iterable

_LAST_PORT = 65535


def check_port_ranges(ranges: Iterable[tuple[str, int, int]]) -> None:
    """Checks (setting, first port, number of ports) of each setting; a first port of 0 means any free ones.

    Raises ValueError where a range ends beyond the last port, or two of them have a port in common.
    """
    taken: dict[int, str] = {}
    for name, first, count in ranges:
        for port in range(first, first + count) if first else ():
            if port > _LAST_PORT:
                raise ValueError(f"{name} {first} leaves too few ports for {count} workers")
            if port in taken:
                raise ValueError(f"{taken[port]} and {name} both need port {port}")
            taken[port] = name
