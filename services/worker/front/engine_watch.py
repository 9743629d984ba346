"""A front's judgement of its engine: one whose heartbeat stands still is hung. Torch-free."""

from __future__ import annotations

import asyncio

from baton.engine.device_watchdog import DeviceWatchdog
from baton.engine.rings.heartbeat import Heartbeat

_LOOK_S = 0.1


async def hang_of(heartbeat: Heartbeat) -> str:
    """Returns once the engine counts as hung, with the reason; never for one that makes progress.

    Hung means no progress for 2 s, and for ten times as long as its current step should take. Time in which
    this process itself did not run is not counted.
    """
    watchdog = DeviceWatchdog()
    while True:
        beat = heartbeat.read()
        if watchdog.look(pending=True, progress=beat.turns, expected_step_s=beat.expected_step_s):
            return f"the engine made no progress for {watchdog.stalled_s:.1f} s"
        await asyncio.sleep(_LOOK_S)
