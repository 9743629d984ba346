"""A block that leaves no process behind, for the process that starts all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from services.common.processes.process_tree import Orphans, adopt_orphans, kill_descendants

# Time to kill what a killed child has left, such as Ray's processes.
_SWEEP_S = 5.0
# Interval of reaping; an orphan stays in the process table for at most twice as long.
_REAP_S = 2.0


@contextlib.asynccontextmanager
async def no_process_left(on_left: Callable[[Sequence[int]], None]) -> AsyncIterator[None]:
    """Kills every descendant that the block leaves, in any session, and reaps orphans while it runs.
    `on_left` is called with the ids of processes that cannot be killed."""
    adopt_orphans()
    reaping = asyncio.create_task(_reap_orphans())
    try:
        yield
    finally:
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)
        if left := kill_descendants(_SWEEP_S):
            on_left(left)


async def _reap_orphans() -> None:
    orphans = Orphans()
    while True:
        await asyncio.sleep(_REAP_S)
        orphans.reap()
