"""`python -m services.cluster.detached`: ClusterConfig as JSON on stdin; supervises until SIGTERM.

SIGTERM drains all workers and exits 0. When this process is killed instead, its workers run on, and its next
start adopts them. Exit code 1: Ray was lost or cannot be joined.

stdout   the ready line, with the admin HTTP port, once every worker has served; or an error
"""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from services.cluster.detached.supervisor import DetachedSupervisor
from services.cluster.group.metrics import group_registry
from services.cluster.group.probes import GroupProbes
from services.common.config.cluster import ClusterConfig
from services.common.observability.admin_http import AdminHttp
from services.common.observability.logs import configure_logs, get_log
from services.common.processes.child_protocol import StopSignal, report_ready, run_child

_POLL_S = 0.1

_log = get_log("supervisor")


class _Threads(ThreadPoolExecutor):
    """Threads of calls to Ray, which block for minutes while its head is away: the process does not wait for
    them when it ends."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


async def serve(config: ClusterConfig, stop: StopSignal) -> None:
    """Supervises until `stop`. Raises BatonError: INVALID where the admin HTTP port cannot be bound,
    UNAVAILABLE where Ray cannot be joined or is lost."""
    workers = config.workers
    configure_logs(config.log_level, exception_texts=True, process="supervisor")
    asyncio.get_running_loop().set_default_executor(_Threads())
    probes = GroupProbes(workers)
    admin = AdminHttp(probes, group_registry(config.name, workers[0].served_name, probes))
    address = await admin.start(config.bound_admin_http_host, config.admin_http_port)
    _log.info("supervisor_starting", admin_http=address, workers=len(workers))
    try:
        await _run(config, stop, probes, address)
    finally:
        await admin.stop()


async def _run(config: ClusterConfig, stop: StopSignal, probes: GroupProbes, address: str) -> None:
    supervisor = DetachedSupervisor(config)
    stopping = asyncio.create_task(stop.wait())
    running = asyncio.create_task(supervisor.run(stop.install))  # joining Ray replaces the handler of SIGTERM
    watching = asyncio.create_task(_watch(supervisor, probes, address))
    try:
        await asyncio.wait({stopping, running, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, watching):
            if task.done():
                task.result()
        probes.drain()
        await _cancelled(running)
        _log.info("draining", within_s=config.drain_s)
        await supervisor.drain()
        _log.info("workers_ended")
    finally:
        await _cancelled(stopping, running, watching)
        await supervisor.close()


async def _watch(supervisor: DetachedSupervisor, probes: GroupProbes, address: str) -> None:
    """Gives the workers' state to the probes."""
    reported = False
    while True:
        probes.update(supervisor.status())
        if not reported and probes.unhealthy() is None:
            reported = True
            report_ready({"admin_http": address})
        await asyncio.sleep(_POLL_S)


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    code = run_child(ClusterConfig, serve)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Ray's own exit handlers would wait for the Ray that has just ended
