"""`python -m services.router`: RouterConfig as JSON on stdin, the ready line on stdout."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from services.common.child import StopSignal, run_child, say_ready
from services.common.config import RouterConfig
from services.common.logs import configure_logs
from services.router.app import Router


async def serve(config: RouterConfig, stop: StopSignal) -> None:
    """Serves until told to stop, then drains."""
    configure_logs(config.log_level, process="router")
    router = Router(config)
    addresses = await router.start()
    stopping = asyncio.create_task(stop.wait())
    usable = asyncio.create_task(router.usable())
    try:
        await asyncio.wait((stopping, usable), return_when=asyncio.FIRST_COMPLETED)
        if usable.done():
            say_ready(addresses)
        await stopping
    finally:
        usable.cancel()
        await router.stop(config.drain_s)


if __name__ == "__main__":
    sys.exit(run_child(RouterConfig, serve, uvloop.new_event_loop))
