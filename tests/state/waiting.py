"""Waiting for what has no event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(true: Callable[[], bool | Awaitable[bool]], seconds: float = 20.0) -> None:
    """Returns once `true` says so; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            answer = true()
            if answer is True or (not isinstance(answer, bool) and await answer):
                return
            await asyncio.sleep(0.01)
