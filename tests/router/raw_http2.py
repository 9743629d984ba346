"""HTTP/2 frames over a bare socket, for what no client library would send."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str, authority: str) -> bytes:
    """The header block of a gRPC call: literals without indexing and without Huffman coding (RFC 7541)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())


def message(data: bytes) -> bytes:
    """A gRPC message, not compressed."""
    return b"\0" + struct.pack(">I", len(data)) + data


def _string(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data


@dataclass
class Http2:
    """A connection after the handshake. Blocks: use it in a thread."""

    peer: socket.socket
    received: bytearray = field(default_factory=bytearray)
    next_stream: int = 1
    goaway: bool = False

    @classmethod
    def connect(cls, address: str) -> Http2:
        host, _, port = address.rpartition(":")
        peer = socket.create_connection((host, int(port)), timeout=20)
        peer.sendall(PREFACE + frame(SETTINGS, 0, 0))
        return cls(peer)

    def open_and_reset(self, block: bytes, data: bytes, count: int, after_s: float) -> None:
        """Opens `count` streams with a whole call each, and cancels them `after_s` seconds later; 0: each at
        once."""
        opened, resets = bytearray(), bytearray()
        for _ in range(count):
            stream, self.next_stream = self.next_stream, self.next_stream + 2
            opened += frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, data)
            reset = frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
            if after_s:
                resets += reset
            else:
                opened += reset
        self.peer.sendall(opened)
        time.sleep(after_s)
        self.peer.sendall(resets)
        self._answer()

    def _answer(self) -> None:
        """Reads what has come, and acknowledges settings and pings as a client must."""
        self.peer.setblocking(False)
        try:
            while part := self.peer.recv(1 << 16):
                self.received += part
        except BlockingIOError:
            pass
        finally:
            self.peer.settimeout(20)
        while len(self.received) >= 9:
            length = int.from_bytes(self.received[:3], "big")
            if len(self.received) < 9 + length:
                return
            kind, flags = self.received[3], self.received[4]
            payload = bytes(self.received[9 : 9 + length])
            del self.received[: 9 + length]
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.peer.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            self.goaway = self.goaway or kind == GOAWAY
