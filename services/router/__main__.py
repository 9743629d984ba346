"""`python -m services.router`: RouterConfig as a JSON line on stdin, the ready line on stdout.

Later lines of stdin tell of what the parent runs: `{"workers": ["host:port", …]}` names all its workers from
then on, `{"store_restarts": n}` how often it has started the embedded Redis again.
"""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from baton.wakeups import batch_wakeups
from services.common.config.router import RouterConfig
from services.common.observability.logs import configure_logs, get_log
from services.common.processes.child_protocol import StopSignal, messages_from_parent, report_ready, run_child
from services.router.app import Router
from services.router.http.descriptors import raise_descriptor_limit

_log = get_log("router")


async def serve(config: RouterConfig, stop: StopSignal) -> None:
    """Serves until told to stop, then drains."""
    configure_logs(config.log_level, process="router")
    batch_wakeups()
    raise_descriptor_limit(config.connections)
    router = Router(config)
    addresses = await router.start()
    stopping = asyncio.create_task(stop.wait())
    usable = asyncio.create_task(router.usable())
    refused = asyncio.create_task(router.store.refusal())
    hearing = asyncio.create_task(_hear(router))
    try:
        await asyncio.wait((stopping, usable, refused), return_when=asyncio.FIRST_COMPLETED)
        if usable.done():
            report_ready(addresses)
            gc.freeze()  # a look at all that was loaded would hold up every stream for 50 ms and more
        elif refused.done():
            raise refused.result()
        await stopping
    finally:
        for task in (usable, refused, hearing):
            task.cancel()
        await router.stop(config.drain_s)


async def _hear(router: Router) -> None:
    """Follows what the parent tells; when it tells nothing any more, its last word stays true."""
    try:
        async for message in messages_from_parent():
            if "workers" in message:
                router.discovery.tell(message["workers"])
            router.store.restarts = message.get("store_restarts", router.store.restarts)
    except Exception:
        _log.exception("address_feed_failed")


if __name__ == "__main__":
    sys.exit(run_child(RouterConfig, serve, uvloop.new_event_loop))
