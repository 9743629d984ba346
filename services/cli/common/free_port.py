"""Checks that a port is free before a process is started that listens on it."""

from __future__ import annotations

import contextlib
import socket

from baton.base.addresses import join_address, listening_host
from services.common.config.settings_tree.reader import invalid


def require_free(host: str, port: int, flag: str) -> None:
    """Raises `BatonError(INVALID)` if the port cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(listening_host(host), port, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise invalid(f"cannot listen on {join_address(host, port)} ({flag}): {error.strerror}") from None
