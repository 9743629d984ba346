"""A worker without a supervisor whose name another one keeps: it waits, with pauses that double.

Where both were restarted as soon as they end, they would take turns, and each time drain and load the model.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.common.observability.logs import get_log
from services.common.processes.child_protocol import RestartNeededError

if TYPE_CHECKING:
    from baton.base.errors import NameTakenError
    from services.common.processes.child_protocol import StopSignal
    from services.worker.front.registration import Registration

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0

_log = get_log("registration")


async def wait_for_name(
    registration: Registration, taken: NameTakenError, stop: StopSignal, timeout_s: float
) -> None:
    """Waits with `registration`, which it closes, until `stop` is signalled. Raises RestartNeededError once
    the name is free, `taken` where it is not after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + timeout_s, FIRST_PAUSE_S
    stopped = asyncio.create_task(stop.wait())
    try:
        while loop.time() < deadline:
            _log.warning(
                "name_taken", member=taken.name, host=taken.host, address=taken.address, retry_in_s=pause_s
            )
            await asyncio.wait({stopped}, timeout=min(pause_s, deadline - loop.time()))
            if stopped.done():
                return
            if await registration.may_have_name():
                raise RestartNeededError(f"{taken.name} is free again")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise taken
    finally:
        stopped.cancel()
        await registration.close()
