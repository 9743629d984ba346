"""`python -m services.router`: RouterConfig as a JSON line on stdin, the ready line on stdout.

Each later line of stdin, `{"workers": ["host:port", …]}`, names all the workers there are from then on.
"""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from services.common.child import StopSignal, messages_from_parent, run_child, say_ready
from services.common.config import RouterConfig
from services.common.logs import configure_logs, get_log
from services.router.app import Router

_log = get_log("router")


async def serve(config: RouterConfig, stop: StopSignal) -> None:
    """Serves until told to stop, then drains."""
    configure_logs(config.log_level, process="router")
    router = Router(config)
    addresses = await router.start()
    stopping = asyncio.create_task(stop.wait())
    usable = asyncio.create_task(router.usable())
    hearing = asyncio.create_task(_hear_of_workers(router))
    try:
        await asyncio.wait((stopping, usable), return_when=asyncio.FIRST_COMPLETED)
        if usable.done():
            say_ready(addresses)
            gc.freeze()  # a look at all that was loaded would hold up every stream for 50 ms and more
        await stopping
    finally:
        usable.cancel()
        hearing.cancel()
        await router.stop(config.drain_s)


async def _hear_of_workers(router: Router) -> None:
    """Follows the list of workers; when nobody tells it any more, the last one stays true."""
    try:
        async for message in messages_from_parent():
            await router.directory.set_addresses(message["workers"])
    except Exception:
        _log.exception("address_feed_failed")


if __name__ == "__main__":
    sys.exit(run_child(RouterConfig, serve, uvloop.new_event_loop))
