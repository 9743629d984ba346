"""Measures how long this process's runnable threads wait for a CPU, as the kernel counts it.

The lag of the event loop is not enough: with gRPC another thread receives a message first, and its wait for a
CPU is invisible to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

EVERY_S = 0.1
_TASKS = Path("/proc/self/task")


class CpuWait:
    """Samples while `run` runs: the mean wait in seconds of each tenth of a second. No samples where the
    kernel does not count.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.samples: list[float] = []

    async def run(self) -> None:
        """Samples until cancelled."""
        waited, times = _counts()
        while True:
            await asyncio.sleep(EVERY_S)
            waited_now, times_now = _counts()
            if times_now > times and waited_now >= waited:
                self.samples.append((waited_now - waited) / (times_now - times) / 1e9)
            waited, times = waited_now, times_now


def _counts() -> tuple[int, int]:
    """Nanoseconds that all threads have waited, and how often one was scheduled."""
    waited = times = 0
    for task in _TASKS.glob("*/schedstat"):
        try:
            _, delay, slices = task.read_bytes().split()
        except (OSError, ValueError):
            continue  # the thread has ended
        waited += int(delay)
        times += int(slices)
    return waited, times
