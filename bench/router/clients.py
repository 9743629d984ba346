"""A process of clients: `python -m bench.router.clients`. It answers lines of JSON (`JsonLinesProcess`):

{"start": {"api": "grpc", "address": "host:port", "streams": 128, "connections": 4,
           "output_len": 400, "pause_s": 0.5}}     begins; with SSE each stream has its own connection
{"reset": true}                                     counts from now on
{"read": true}                                      the counts
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.base.addresses import split_address
from baton.base.process_tuning import batch_wakeups
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from bench.router.fake_workers import TOKEN

# Connections opened at once: fewer than a listener's backlog.
_AT_ONCE = 64
# More times to the first token are not kept.
_MOST_TTFTS = 100_000
PROMPT = 32
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_FRAME_HEAD = 9
_MESSAGE_HEAD = 5
# The whole connection's window, and after how many received bytes it is filled up again.
_WINDOW, _REFILL = (1 << 31) - 1, 1 << 24
_INITIAL_WINDOW_SETTING, _FIRST_WINDOW = 4, 65_535
_TEXT = re.compile(rb'"text":"([a-zA-Z0-9]*)"')
# Bytes of a token's text (`bench.model_folders`).
_TOKEN_BYTES = 3
_EVENT_END = b"\n\n"
# The last chunk, after the end of the one before.
_END = b"\r\n0\r\n\r\n"


async def start(asked: dict[str, Any], counts: Counts) -> None:
    """Opens the connections; each begins once it is open."""
    host, port = split_address(asked["address"])
    load = Load(asked["output_len"], asked["pause_s"])
    loop = asyncio.get_running_loop()
    streams, connections = asked["streams"], asked["connections"]
    if asked["api"] == "sse":
        protocols: list[Any] = [lambda: SseStream(load, counts)] * streams
    else:
        shares = [streams // connections + (index < streams % connections) for index in range(connections)]
        protocols = [lambda share=share: GrpcConnection(load, counts, share) for share in shares if share]
    for first in range(0, len(protocols), _AT_ONCE):
        batch = protocols[first : first + _AT_ONCE]
        await asyncio.gather(*(loop.create_connection(one, host, port) for one in batch))


async def serve() -> None:
    """Answers requests until stdin ends."""
    counts = Counts()
    print(json.dumps({"ready": True}), flush=True)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        if "start" in request:
            await start(request["start"], counts)
        answer = dataclasses.asdict(counts) if "read" in request else {}
        if "reset" in request:
            for field in dataclasses.fields(Counts):
                setattr(counts, field.name, getattr(Counts(), field.name))
        print(json.dumps(answer), flush=True)


@dataclass(slots=True)
class Counts:
    """Counts since the last reset. `messages`: with tokens. `ttft_ms`: from a request's send to its first
    token."""

    tokens: int = 0
    messages: int = 0
    requests: int = 0
    failed: int = 0
    ttft_ms: list[float] = field(default_factory=list)

    def first_token(self, after_ms: float) -> None:
        """Notes the time to a request's first token."""
        if len(self.ttft_ms) < _MOST_TTFTS:
            self.ttft_ms.append(after_ms)


@dataclass(frozen=True, slots=True)
class Load:
    """`output_len`: tokens of each request. A stream waits up to `pause_s` before each."""

    output_len: int
    pause_s: float


class ClosedLoop:
    """One stream. `send(max_tokens)` begins a request; its owner calls `start`, `received` and `ended`. The
    first request has a random length, so that streams are not in step with each other."""

    def __init__(self, load: Load, counts: Counts, send: Callable[[int], None]) -> None:
        self._load = load
        self._counts = counts
        self._send = send
        self._wanted = 0
        self._sent_ns = 0
        self._received = 0
        self._first = True

    def start(self) -> None:
        """Begins after a pause of its own."""
        self._pause()

    def received(self, tokens: int) -> None:
        """Counts a message that has `tokens` tokens."""
        if not self._received:
            self._counts.first_token((time.monotonic_ns() - self._sent_ns) / 1e6)
        self._received += tokens
        self._counts.tokens += tokens
        self._counts.messages += 1

    def ended(self) -> None:
        """The response has ended; the next request follows. One that lacks tokens counts as failed."""
        complete = self._received == self._wanted
        self._counts.requests += complete
        self._counts.failed += not complete
        self._pause(0.0 if complete else 0.1)

    def _pause(self, least_s: float = 0.0) -> None:
        pause_s = least_s + random.random() * self._load.pause_s
        asyncio.get_running_loop().call_later(pause_s, self._begin)

    def _begin(self) -> None:
        longest = self._load.output_len
        self._wanted = random.randint(2, longest) if self._first else longest
        self._first = False
        self._received = 0
        self._sent_ns = time.monotonic_ns()
        self._send(self._wanted)


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


class SseStream(asyncio.Protocol):
    """One connection, whose requests follow one another."""

    def __init__(self, load: Load, counts: Counts) -> None:
        self._loop = ClosedLoop(load, counts, self._send)
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._loop.start()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):  # short enough for one read
            self._rest = b""
            self._loop.ended()
            return
        whole = data.rfind(_EVENT_END) + len(_EVENT_END) if _EVENT_END in data else 0
        for text in _TEXT.findall(data, 0, whole):
            if text:
                self._loop.received(len(text) // _TOKEN_BYTES)
        self._rest = data[whole:]
        if self._rest.endswith(_END):
            self._rest = b""
            self._loop.ended()

    def _send(self, max_tokens: int) -> None:
        body = json.dumps(
            {
                "model": "fake",
                "prompt": [TOKEN] * PROMPT,
                "temperature": 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        assert self._transport is not None
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)


if __name__ == "__main__":
    import uvloop

    batch_wakeups()
    uvloop.run(serve())
