"""A plain GET request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from loadgen.common.record import Outcome
from loadgen.targets.http_target import ConnectionPool
from loadgen.targets.target import Failure

_LONGEST = 16 * 1024 * 1024


class _Body:
    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def on_body(self, data: bytes, late: float | None) -> None:
        self.data += data
        if len(self.data) > _LONGEST:
            raise Failure(Outcome.MALFORMED, "too long")


async def get(url: str, timeout_s: float, headers: str = "") -> bytes:
    """The body of a 200. Raises Failure for anything else. `headers` are whole lines."""
    path = "/" + url.split("://", 1)[1].partition("/")[2]
    pool = ConnectionPool(url.removesuffix(path), time.monotonic)
    body = _Body()
    try:
        async with asyncio.timeout(timeout_s):
            connection = await pool.take()
            try:
                await connection.exchange(f"{pool.head('GET', path, headers)}\r\n".encode(), body)
            finally:
                connection.close()
    except TimeoutError:
        raise Failure(Outcome.TIMEOUT) from None
    if body.status != 200:
        raise Failure(f"HTTP_{body.status}")
    return bytes(body.data)
