"""A client that has closed its sending side: it may wait for its answer, or have left.

TCP shows both alike until something is sent: a client that has left answers that with a reset. So an answer
of which nothing is due for a while is preceded by `100 Continue`, which every client of HTTP/1.1 skips.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# An answer that begins within this time needs no interim response. With `_LOOK_S` and a decode step it is
# less than the second within which all is free that a client has left.
PATIENCE_S = 0.5
_LOOK_S = 0.1
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# The first byte of `struct tcp_info`, and its value once the peer has reset the connection.
_TCP_CLOSE = 7


class HalfClosed:
    """Aborts a half-closed connection once its client turns out to have left."""

    def __init__(self, transport: asyncio.Transport, may_continue: Callable[[], bool]) -> None:
        """`may_continue`: whether an interim response may be sent now: no answer has begun, and the client
        knows them."""
        self._transport = transport
        self._may_continue = may_continue
        self._loop = asyncio.get_running_loop()
        self._asks_at = self._loop.time() + PATIENCE_S
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """Ends the watch of the connection."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._is_reset():  # no event tells, since nothing is read any more
            self._transport.abort()
            return
        now = self._loop.time()
        if now >= self._asks_at and self._may_continue():
            self._transport.write(_CONTINUE)
            self._asks_at = float("inf")
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _is_reset(self) -> bool:
        connection: socket.socket = self._transport.get_extra_info("socket")
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] == _TCP_CLOSE
