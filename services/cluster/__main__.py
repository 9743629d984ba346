"""`python -m services.cluster`: ClusterConfig as JSON on stdin; runs its workers until SIGTERM.

stdout   the ready line once every worker serves, or an error; then `{"workers": ["host:port", …]}` whenever
         the list of those that serve has changed
"""

from __future__ import annotations

import asyncio
import os
import sys

from services.cluster.on_ray.ray_cluster import RayCluster
from services.cluster.plain_cluster import PlainCluster
from services.cluster.supervision.supervised import SupervisedCluster
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import configure_logs
from services.common.processes.child_protocol import StopSignal, report, report_ready, run_child

POLL_S = 0.1
STARTING_POLL_S = 0.03
# Time for a worker to exit once it has drained.
_END_S = 2.0


async def serve(config: ClusterConfig, stop: StopSignal) -> None:
    """Runs the cluster until `stop`. Raises the BatonError of a worker that does not start, or UNAVAILABLE
    where Ray is lost."""
    configure_logs(config.log_level, exception_texts=True, process="cluster")
    workers = RayCluster(config, stop.install) if config.on_ray else PlainCluster(config)
    stopping = asyncio.create_task(stop.wait())
    publishing = asyncio.create_task(_publish(workers))
    within_s = 0.0
    try:
        await asyncio.wait({stopping, publishing}, return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            await publishing
        within_s = config.drain_s + _END_S
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await workers.stop(within_s)
        await workers.close()


async def _publish(workers: SupervisedCluster) -> None:
    """Writes the ready line and every change of the serving workers to stdout, until no worker can run."""
    await workers.open()
    ready, published = False, [""]
    while True:
        status = workers.status()
        if not ready and status.failure:
            raise status.failure.error()
        if not ready and status.serving:
            ready = True
            report_ready({})
        if ready and status.complete and status.addresses != published:
            published = status.addresses
            report({"workers": published})
        await asyncio.sleep(POLL_S if ready else STARTING_POLL_S)


if __name__ == "__main__":
    code = run_child(ClusterConfig, serve)
    sys.stderr.flush()
    os._exit(code)  # Ray's own exit handlers would wait for the Ray that has just ended
