"""Clients that are gone without a word: their host lost its power or its network, so neither FIN nor RST
arrives.

While nothing is sent to such a client, TCP's keepalive finds out (tcp(7), TCP_KEEPIDLE). While sent bytes are
not acknowledged no keepalive is sent, and the kernel retransmits for about 15 minutes; so connections are
checked for the time since their last acknowledgement. TCP_USER_TIMEOUT would do both, but also ends
connections of clients that acknowledge and do not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterable

# As a gRPC client that is gone is noticed (`services.common.rpc.grpc_server`).
_IDLE_S, _ANSWER_S = 10, 5
SILENT_S = float(_IDLE_S + _ANSWER_S)
_LOOK_S = 1.0
# Of `struct tcp_info` (linux/tcp.h): `tcpi_retransmits`, timeouts since the last acknowledgement, and
# `tcpi_last_ack_recv`, milliseconds since that.
_RETRANSMITS, _LAST_ACK, _INFO_BYTES = 2, 56, 60


def keep_alive(listening: socket.socket) -> None:
    """Makes the connections that this socket accepts probe clients that have nothing to acknowledge."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ANSWER_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)


def is_silent(tcp_info: bytes) -> bool:
    """True if sent bytes had to be sent again and nothing was acknowledged for `SILENT_S`. Answers to
    keepalive are acknowledgements, too, so a connection that was idle before is not silent."""
    (last_ack_ms,) = struct.unpack_from("=I", tcp_info, _LAST_ACK)
    return tcp_info[_RETRANSMITS] > 0 and last_ack_ms >= SILENT_S * 1000


async def abort_silent(transports: Callable[[], Iterable[asyncio.Transport]]) -> None:
    """Aborts connections whose client is silent, until it is cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for transport in list(transports()):
            connection: socket.socket | None = transport.get_extra_info("socket")
            if connection is None or transport.is_closing():
                continue
            with contextlib.suppress(OSError):  # closed meanwhile
                if is_silent(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)):
                    transport.abort()
