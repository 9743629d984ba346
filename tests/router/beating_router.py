"""`python -m services.router` that also records every delay of its event loop.

argv[1] names the file that gets a line for each delay above `LEAST_S`: when it began and ended, on the
monotonic clock, and the CPU time that this process used meanwhile. The beat starts before the router does. A
delay without CPU time is the machine's: other processes had the processor.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from services.common.config.router import RouterConfig
from services.common.processes.child_protocol import StopSignal, run_child
from services.router.process import serve

LEAST_S = 0.004
_PERIOD_S = 0.001


async def _beat(path: str) -> None:
    with open(path, "a", buffering=1) as record:  # noqa: ASYNC230 (short lines to a local file)
        last, cpu = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(_PERIOD_S)
            now, used = time.monotonic(), time.process_time()
            if now - last > LEAST_S:
                record.write(f"{last} {now} {used - cpu}\n")
            last, cpu = now, used


async def _serve_with_beat(config: RouterConfig, stop: StopSignal) -> None:
    beat = asyncio.create_task(_beat(sys.argv[1]))
    try:
        await serve(config, stop)
    finally:
        beat.cancel()


if __name__ == "__main__":
    sys.exit(run_child(RouterConfig, _serve_with_beat, uvloop.new_event_loop))
