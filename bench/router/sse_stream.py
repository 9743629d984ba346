"""A stream of completions over HTTP/1.1 that counts the bytes of its events instead of parsing them."""

from __future__ import annotations

import asyncio
import json
import re

from bench.router.closed_loop import PROMPT, ClosedLoop, Load
from bench.router.counts import Counts
from bench.router.fake_workers import TOKEN

_TEXT = re.compile(rb'"text":"([a-zA-Z0-9]*)"')
# Bytes of a token's text (`fake_model_folder`).
_TOKEN_BYTES = 3
_EVENT_END = b"\n\n"
# The last chunk, after the end of the one before.
_END = b"\r\n0\r\n\r\n"


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
