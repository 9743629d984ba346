"""One router process.

Lines of stdin that follow the configuration report changes of what the parent runs: `{"workers":
["host:port", …]}` replaces its list of workers, `{"store_restarts": n}` counts restarts of the embedded
Redis; several processes also receive what operators have changed (`processes.operator_state`), which of them
do not answer (`processes.member_health`), and that one is to serve the admin ports from now on.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

from baton.base.errors import BatonError
from baton.base.process_tuning import batch_wakeups, switch_threads_often
from services.common.config.router import RouterConfig
from services.common.observability.logs import configure_logs, get_log
from services.common.processes.child_protocol import (
    StopSignal,
    messages_from_parent,
    report_ready,
)
from services.router.app import Router
from services.router.http.descriptors import raise_descriptor_limit
from services.router.processes.member_health import failure, silence

# New objects before the collector looks for cycles among them, about 1 ms of work. What is in flight for some
# hundred streams exceeds Python's default of 700 with every step, and almost none of it is in a cycle.
_YOUNG_OBJECTS = 10_000

# How often a process tries to open the admin ports that another one had.
_ADMIN_TRIES, ADMIN_PAUSE_S = 20, 0.5

_log = get_log("router")


async def serve(config: RouterConfig, stop: StopSignal) -> None:
    """Serves until `stop` is set, then drains."""
    configure_logs(config.log_level, process="router")
    batch_wakeups()
    if config.tracing.otlp_endpoint is not None:
        switch_threads_often()
    raise_descriptor_limit(config.connections)
    router = Router(config)
    addresses = await router.start()
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(router.readiness.wait(ready=True))
    refused = asyncio.create_task(router.store.refusal())
    updates = asyncio.create_task(follow_parent(router))
    try:
        await asyncio.wait((stopping, ready, refused), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            report_ready(addresses)
            router.operator_state.begin()
            gc.freeze()  # a full collection would delay every stream by 50 ms or more
            gc.set_threshold(_YOUNG_OBJECTS)
        elif refused.done():
            raise refused.result()
        await stopping
    finally:
        for task in (ready, refused, updates):
            task.cancel()
        await router.stop(config.drain_s)


async def follow_parent(router: Router, admin_pause_s: float = ADMIN_PAUSE_S) -> None:
    """Applies the parent's messages. If they end, the last ones stay valid."""
    async with asyncio.TaskGroup() as tasks:
        async for message in messages_from_parent():
            if message.get("serve_admin"):
                tasks.create_task(_serve_admin(router, admin_pause_s))
            try:
                _apply(router, message)
            except Exception:
                _log.exception("parent_updates_failed")


def _apply(router: Router, message: Mapping[str, Any]) -> None:
    if "silent_processes" in message:
        router.readiness.set_processes(silence(message), failure(message))
    if "workers" in message:
        router.discovery.set_parent_workers(message["workers"])
    router.operator_state.receive(message)
    router.readiness.update()
    router.store.restarts = message.get("store_restarts", router.store.restarts)


async def _serve_admin(router: Router, pause_s: float) -> None:
    """Opens the admin ports, which the process before may just be giving up."""
    for _ in range(_ADMIN_TRIES):
        try:
            return await router.serve_admin()
        except BatonError as error:
            _log.warning("admin_ports_not_opened", reason=error.message)
        await asyncio.sleep(pause_s)
