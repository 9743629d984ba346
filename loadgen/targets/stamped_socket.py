"""Measures how late this process reads received data, by the kernel's time stamps.

The lag of an event loop is measured by a timer. A token also waits for a CPU, for the loop's turn, and for
earlier reads. Linux stamps the arrival (`SO_TIMESTAMPNS`, socket(7)); the time of reading is taken from the
same clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

# <asm-generic/socket.h>; not in Python's socket module. The stamp is a struct timespec.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@qq")
_SPACE = socket.CMSG_SPACE(TIMESPEC.size)
# asyncio reads 256 KiB; allocating that costs more than processing a token.
_AT_ONCE = 64 * 1024


class StampedSocket(socket.socket):
    """A TCP socket for an event loop's transport, with time stamps."""

    _arrived_ns: int | None = None

    def stamp(self) -> None:
        """Requests time stamps; without them the lag is unknown."""
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def late_s(self) -> float | None:
        """Seconds since the last byte of the last read arrived; None where the kernel does not report it."""
        return None if self._arrived_ns is None else max(0, time.time_ns() - self._arrived_ns) / 1e9

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receives like `socket.recv`, and notes the packet's time."""
        data, ancillary, _, _ = self.recvmsg(min(size, _AT_ONCE), _SPACE, flags)
        self._note(ancillary)
        return data

    def recv_into(self, buffer: Buffer, size: int = 0, flags: int = 0) -> int:
        """Receives like `socket.recv_into`, which TLS uses, and notes the packet's time."""
        count, ancillary, _, _ = self.recvmsg_into([memoryview(buffer)[: size or None]], _SPACE, flags)
        self._note(ancillary)
        return count

    def _note(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        self._arrived_ns = None
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = TIMESPEC.unpack_from(data)
                self._arrived_ns = seconds * 1_000_000_000 + nanoseconds


async def connect(host: str, port: int) -> StampedSocket:
    """Connects to the first of the host's addresses that accepts. Raises OSError where none does."""
    loop = asyncio.get_running_loop()
    failed: OSError | None = None
    for family, kind, protocol, _, address in await _addresses(host, port):
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(StampedSocket(family, kind, protocol))
            connection.setblocking(False)
            connection.stamp()
            try:
                await loop.sock_connect(connection, address)
            except OSError as error:
                failed = error
                continue
            undo.pop_all()
            return connection
    raise failed or OSError("the host has no address")


async def _addresses(host: str, port: int) -> Sequence[tuple[int, int, int, str, Any]]:
    """Parses numeric addresses; resolves names in a thread."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
