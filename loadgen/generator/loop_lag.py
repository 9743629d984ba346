"""Measures how late an event loop runs, by which token times may be late.

A tick is due every 5 ms. A loop that is busy during several ticks makes one late call, but each missed tick
is counted with its own lag, so that a long stall weighs more than a short one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.005
# asyncio rounds a wait up to the next millisecond, which is no lag.
_TIMER_S = 0.001


class LoopLag:
    """Samples the lag of an event loop while `run` runs in it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.samples: list[float] = []

    async def run(self) -> None:
        """Samples until cancelled."""
        due = self._clock() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - self._clock()))
            now = self._clock()
            while due <= now:
                self.samples.append(max(0.0, now - due - _TIMER_S))
                due += TICK_S
