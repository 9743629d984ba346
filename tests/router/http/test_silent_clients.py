"""Connections that count as silent; a client that is cut off is in tests/hosts."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, cast

import pytest

from services.router.http.silent_clients import abort_silent, is_silent, keep_alive


@pytest.mark.parametrize(
    ("retransmits", "last_ack_ms", "silent"),
    [(6, 15_000, True), (6, 14_999, False), (0, 60_000, False), (1, 1 << 31, True)],
    ids=["silent", "not for long enough", "idle, nothing sent again", "for weeks"],
)
def test_only_what_is_sent_again_for_15_s_is_silent(retransmits: int, last_ack_ms: int, silent: bool) -> None:
    info = struct.pack("=BBB5x12I", 1, 0, retransmits, *range(100, 112))
    info += struct.pack("=I", last_ack_ms)
    assert is_silent(info) == silent


def test_accepted_connections_are_kept_alive_and_not_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        keep_alive(listening)
        with socket.create_connection(listening.getsockname()) as client, listening.accept()[0] as accepted:
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            assert not is_silent(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60))


class ClosedTransport:
    """A transport whose socket was closed, which does not say so yet; `looked`: how often it was asked."""

    def __init__(self) -> None:
        self.looked = 0

    def get_extra_info(self, name: str) -> socket.socket:
        self.looked += 1
        closed = socket.socket()
        closed.close()
        return closed

    def is_closing(self) -> bool:
        return False


async def test_a_socket_that_was_closed_meanwhile_ends_no_watch() -> None:
    transport = ClosedTransport()
    watch = asyncio.create_task(abort_silent(lambda: [cast(Any, transport)]))
    async with asyncio.timeout(20):
        while transport.looked < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not watch.done()
    watch.cancel()
