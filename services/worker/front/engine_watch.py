"""Detects an engine that hangs by its heartbeat. Torch-free."""

from __future__ import annotations

import asyncio

from baton.engine.device_watchdog import DeviceWatchdog
from baton.engine.rings.heartbeat import Heartbeat

_POLL_S = 0.1


async def detect_hang(heartbeat: Heartbeat) -> str:
    """Returns the reason once the engine counts as hung; never returns while it makes progress.

    Hung means no progress for 2 s and for ten times the expected duration of its current step. Time in which
    this process itself did not run does not count.
    """
    watchdog = DeviceWatchdog()
    while True:
        beat = heartbeat.read()
        if watchdog.look(pending=True, progress=beat.turns, expected_step_s=beat.expected_step_s):
            return f"the engine made no progress for {watchdog.stalled_s:.1f} s"
        await asyncio.sleep(_POLL_S)
