"""A client of its own for looking into a server behind Baton's back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import Redis

# redis-py's types know neither bytes from text nor one call from many.
Raw = Any


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[Raw]:
    """A plain client of the server at `url`, whichever kind of URL it is."""
    client = Redis.from_url(url.replace("+cluster", ""))
    try:
        yield cast(Raw, client)
    finally:
        await client.aclose()
