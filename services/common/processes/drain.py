"""Draining: a worker refuses new work until its running work has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.base.errors import BatonError, ErrorKind

_POLL_S = 0.05


class Drain:
    """The drain of one worker."""

    def __init__(self) -> None:
        self.started = False

    def check(self) -> None:
        """Raises BatonError(UNAVAILABLE) once the drain has started."""
        if self.started:
            raise BatonError(ErrorKind.UNAVAILABLE, "the worker is draining")

    async def wait(self, busy: Callable[[], bool], limit_s: float) -> bool:
        """Starts draining and waits until nothing is busy; False where `limit_s` was too short."""
        self.started = True
        deadline = asyncio.get_running_loop().time() + limit_s
        while busy():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True
