"""Streams of RouterService.Generate over HTTP/2 that spend a few µs a message: enough of the protocol to
count what comes, without flow control of what is sent and without reading headers."""

from __future__ import annotations

import asyncio
import struct

from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from bench.router.closed_loop import PROMPT, ClosedLoop, Load
from bench.router.counts import Counts
from bench.router.fake_workers import TOKEN

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_FRAME_HEAD = 9
_MESSAGE_HEAD = 5
# The whole connection's window, and after how many received bytes it is filled up again.
_WINDOW, _REFILL = (1 << 31) - 1, 1 << 24
_INITIAL_WINDOW_SETTING, _FIRST_WINDOW = 4, 65_535


class GrpcConnection(asyncio.Protocol):
    """One connection with `streams` closed loops."""

    def __init__(self, load: Load, counts: Counts, streams: int) -> None:
        self._loops = [ClosedLoop(load, counts, _Send(self, index)) for index in range(streams)]
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        # By stream id: the loop, and the bytes of its unfinished message.
        self._open: dict[int, ClosedLoop] = {}
        self._partial: dict[int, bytes] = {}
        self._next_id = 1
        self._consumed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        settings = struct.pack(">HI", _INITIAL_WINDOW_SETTING, _WINDOW)
        grant = struct.pack(">I", _WINDOW - _FIRST_WINDOW)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, grant))
        for loop in self._loops:
            loop.start()

    def data_received(self, data: bytes) -> None:
        if self._unread:
            data = self._unread + data
        at, end = 0, len(data)
        while at + _FRAME_HEAD <= end:
            length = int.from_bytes(data[at : at + 3], "big")
            upto = at + _FRAME_HEAD + length
            if upto > end:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self._frame(data[at + 3], data[at + 4], stream, data[at + _FRAME_HEAD : upto])
            at = upto
        self._unread = data[at:]

    def send(self, index: int, max_tokens: int) -> None:
        """Begins a request of a loop."""
        request = GenerateRequest(
            model="fake",
            token_ids=TokenIds(ids=[TOKEN] * PROMPT),
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
        ).SerializeToString()
        stream, self._next_id = self._next_id, self._next_id + 2
        self._open[stream] = self._loops[index]
        message = b"\0" + struct.pack(">I", len(request)) + request
        assert self._transport is not None
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, stream, _REQUEST_HEADERS)
            + _frame(_DATA, _END_STREAM, stream, message)
        )

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._consume(len(payload))
            if (loop := self._open.get(stream)) is not None:
                self._messages(loop, stream, payload)
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        if (
            kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        ) and stream in self._open:
            self._partial.pop(stream, None)
            self._open.pop(stream).ended()

    def _messages(self, loop: ClosedLoop, stream: int, payload: bytes) -> None:
        """Counts the tokens of the messages in a stream's next bytes."""
        payload = self._partial.pop(stream, b"") + payload
        at = 0
        while at + _MESSAGE_HEAD <= len(payload):
            upto = at + _MESSAGE_HEAD + int.from_bytes(payload[at + 1 : at + _MESSAGE_HEAD], "big")
            if upto > len(payload):
                break
            message = GenerateResponse.FromString(payload[at + _MESSAGE_HEAD : upto])
            if message.token_ids:
                loop.received(len(message.token_ids))
            at = upto
        if at < len(payload):
            self._partial[stream] = payload[at:]

    def _consume(self, size: int) -> None:
        self._consumed += size
        if self._consumed >= _REFILL:
            self._write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._consumed)))
            self._consumed = 0

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


class _Send:
    """Begins a request of one loop."""

    def __init__(self, connection: GrpcConnection, index: int) -> None:
        self._connection = connection
        self._index = index

    def __call__(self, max_tokens: int) -> None:
        self._connection.send(self._index, max_tokens)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """A literal header field without indexing, neither part compressed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


_REQUEST_HEADERS = b"".join(
    _header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/baton.v1.RouterService/Generate"),
        (b":authority", b"127.0.0.1"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
