"""Two awaitables, of which the first to end decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


async def race(work: Awaitable[T], other: Awaitable[U]) -> tuple[T | None, U | None]:
    """`(result, None)` or `(None, other's result)`; `work` wins a tie. The loser is cancelled, and has ended
    when this returns. An exception of the winner is raised."""
    left, right = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait({left, right}, return_when=asyncio.FIRST_COMPLETED)
        return (left.result(), None) if left.done() else (None, right.result())
    finally:
        left.cancel()
        right.cancel()
        await asyncio.gather(left, right, return_exceptions=True)
