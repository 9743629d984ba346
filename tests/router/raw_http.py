"""HTTP over bare sockets, for what no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.router.conftest import MODEL


@dataclass
class Raw:
    """One TCP connection to an HTTP server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, timeout_s: float = 5) -> tuple[int, bytes]:
        """Status and body of the next answer, which must have a content length."""
        async with asyncio.timeout(timeout_s):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in lines[1:] if line)
            body = await self.reader.readexactly(int(headers[b"content-length"]))
            return int(lines[0].split()[1]), body

    async def closed(self, timeout_s: float = 5) -> bytes:
        """The bytes that still come until the peer closes; TimeoutError where it does not."""
        async with asyncio.timeout(timeout_s):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


@contextlib.asynccontextmanager
async def connect(address: str, source: str | None = None) -> AsyncIterator[Raw]:
    """A connection to `host:port`, from the local address `source`."""
    host, port = address.rsplit(":", 1)
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


def silent(address: str, count: int, source: str) -> list[socket.socket]:
    """Connections that send nothing. Refused ones are omitted."""
    host, port = address.rsplit(":", 1)
    found: list[socket.socket] = []
    for _ in range(count):
        one = socket.socket()
        one.settimeout(1)
        try:
            one.bind((source, 0))
            one.connect((host, int(port)))
        except OSError:
            one.close()
        else:
            found.append(one)
    return found


def post(path: str = "/v1/completions", *headers: str, **fields: Any) -> bytes:
    """A POST request with a JSON body; `headers` go beside its own."""
    body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, **fields})
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return ("\r\n".join(lines) + f"\r\ncontent-length: {len(body)}\r\n\r\n{body}").encode()


def get(path: str = "/health", *headers: str, host: str = "localhost") -> bytes:
    """The bytes of a GET request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", f"host: {host}", *headers, "", ""]).encode()
