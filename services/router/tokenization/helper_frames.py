"""Frames between the router and its helper processes: a JSON header and binary parts, over a socket.

u32 header length, u32 number of parts, u64 length of each part, header, parts
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = struct.Struct("<I")


def send_frame(
    peer: socket.socket,
    header: Mapping[str, Any],
    parts: Sequence[bytes | bytearray] = (),
    deadline: float | None = None,
) -> None:
    """Sends a frame. TimeoutError after `deadline` (monotonic seconds), OSError if the peer is gone."""
    head = json.dumps([header, [len(part) for part in parts]]).encode()
    for data in (_LENGTH.pack(len(head)) + head, *parts):
        _limit(peer, deadline)
        peer.sendall(data)


def receive_frame(
    peer: socket.socket, deadline: float | None = None
) -> tuple[dict[str, Any], list[bytearray]]:
    """Receives a header and its parts. TimeoutError after `deadline` (monotonic seconds), EOFError at the
    end."""
    (length,) = _LENGTH.unpack(_receive(peer, _LENGTH.size, deadline))
    header, sizes = json.loads(_receive(peer, length, deadline))
    return header, [_receive(peer, size, deadline) for size in sizes]


def _receive(peer: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        _limit(peer, deadline)
        received = peer.recv_into(rest)
        if not received:
            raise EOFError
        rest = rest[received:]
    return data


def _limit(peer: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    peer.settimeout(left)
