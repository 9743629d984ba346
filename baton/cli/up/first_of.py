"""Awaits the first of two awaitables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


async def first_of(work: Awaitable[T], other: Awaitable[U]) -> tuple[T | None, U | None]:
    """Returns `(result of work, None)` or `(None, result of other)`, whichever ends first; `work` wins a tie.
    The other is cancelled and has ended when this returns. An exception of the first is raised."""
    left, right = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait({left, right}, return_when=asyncio.FIRST_COMPLETED)
        return (left.result(), None) if left.done() else (None, right.result())
    finally:
        left.cancel()
        right.cancel()
        await asyncio.gather(left, right, return_exceptions=True)
