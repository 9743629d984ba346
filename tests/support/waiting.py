"""Waiting for what has no event: beside an event loop (`until`), or without one (`block_until`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(holds: Callable[[], bool | Awaitable[bool]], within_s: float = 20.0) -> None:
    """Returns once `holds()` does, which may be a coroutine function; TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while True:
            answer = holds()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
            await asyncio.sleep(0.005)


def block_until(
    holds: Callable[[], bool], within_s: float = 20.0, step: Callable[[], object] = lambda: time.sleep(0.001)
) -> None:
    """Takes steps until `holds()` does; AssertionError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        step()
