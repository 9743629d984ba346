"""`python -m services.cluster.group`: ClusterConfig as JSON on stdin; runs its workers until SIGTERM.

SIGTERM drains all workers and exits 0. When this process is killed instead, detached workers run on, and its
next start adopts them; others end with it. Exit code 1: it failed, or Ray was lost or cannot be joined.

stdout   the ready line, with the admin HTTP port, once every worker has served; or an error
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from services.cluster.group.metrics import group_registry
from services.cluster.group.probes import GroupProbes
from services.cluster.on_ray.ray_cluster import RayCluster
from services.cluster.plain_cluster import PlainCluster
from services.cluster.supervision.supervised import SupervisedCluster
from services.common.config.cluster import ClusterConfig
from services.common.config.plaintext import plaintext_ports
from services.common.observability.admin_http import AdminHttp
from services.common.observability.logs import configure_logs, get_log
from services.common.processes.child_protocol import StopSignal, report_ready, run_child
from services.common.processes.no_process_left import no_process_left

_POLL_S = 0.1
# What is left of `drain_s` once the last worker must have ended, for this process's own end.
_OWN_END_S, _OWN_END_SHARE = 0.5, 0.05

log = get_log("group")


async def serve(config: ClusterConfig, stop: StopSignal) -> None:
    """Runs the group until `stop`. Raises BatonError: INVALID where a port cannot be bound or would be
    plaintext against the configuration, or there are too few GPUs, UNAVAILABLE where the GPU driver does not
    answer, or Ray is lost or cannot be joined."""
    process = "supervisor" if config.detached else "group"
    configure_logs(config.log_level, exception_texts=True, process=process, group=config.name)
    for worker in config.workers:
        plaintext_ports(worker)  # a worker would refuse to start again and again
    probes = GroupProbes(config.workers)
    model = config.workers[0].served_name
    admin = AdminHttp(probes, group_registry(config.name, model, probes))
    async with no_process_left(_on_left):
        address = await admin.start(config.bound_admin_http_host, config.admin_http_port)
        log.info("group_starting", admin_http=address, workers=len(config.workers))
        try:
            await _run(config, stop, probes, address)
        finally:
            await admin.stop()


async def _run(config: ClusterConfig, stop: StopSignal, probes: GroupProbes, address: str) -> None:
    cluster = RayCluster(config, stop.install) if config.on_ray else PlainCluster(config)
    stopping = asyncio.create_task(stop.wait())
    running = asyncio.create_task(_watch(cluster, probes, address))
    within_s: float | None = None if config.detached else 0.0  # None: the workers run on
    try:
        await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        probes.drain()
        if not stopping.done():
            running.result()
        within_s = config.drain_s - min(_OWN_END_S, _OWN_END_SHARE * config.drain_s)
        log.info("draining", within_s=within_s)
    finally:
        for task in (stopping, running):
            task.cancel()
        await asyncio.gather(stopping, running, return_exceptions=True)
        if within_s is not None:
            await cluster.stop(within_s)
            log.info("workers_ended")
        await cluster.close()


async def _watch(cluster: SupervisedCluster, probes: GroupProbes, address: str) -> None:
    """Starts the workers and gives their state to the probes. Raises what supervision fails with."""
    await cluster.open()
    reported = False
    while True:
        probes.update(cluster.status())
        if not reported and probes.unhealthy() is None:
            reported = True
            report_ready({"admin_http": address})
        await asyncio.sleep(_POLL_S)


def _on_left(pids: Sequence[int]) -> None:
    log.error("processes_left", pids=list(pids))


if __name__ == "__main__":
    code = run_child(ClusterConfig, serve)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Ray's own exit handlers would wait for the Ray that has just ended
