"""`python -m services.cluster`: ClusterConfig as JSON on stdin; runs its workers until SIGTERM.

stdout   the ready line once every worker serves, or an error; then `{"workers": ["host:port", …]}` whenever
         the list of those that serve has changed
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Protocol

from baton.base.errors import BatonError, ErrorKind
from services.cluster.plain_cluster import PlainCluster
from services.cluster.ray_cluster import RayCluster
from services.cluster.report import ClusterStatus
from services.cluster.supervision import UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import configure_logs
from services.common.processes.child_protocol import StopSignal, report, report_ready, run_child

POLL_S = 0.1
STARTING_POLL_S = 0.03
# Longer than Ray takes to restart the supervisor on a busy machine.
_SUPERVISOR_SILENT_S = 60.0
# Time for a worker to exit once it has drained.
_END_S = 2.0


class Workers(Protocol):
    """Runs the workers, with Ray or without."""

    async def open(self) -> None: ...
    async def status(self) -> ClusterStatus: ...
    async def stop(self, within_s: float) -> None: ...
    async def close(self) -> None: ...


async def serve(config: ClusterConfig, stop: StopSignal) -> None:
    """Runs the cluster until `stop`. Raises the BatonError of a worker that does not start, or UNAVAILABLE
    where the supervisor is lost."""
    configure_logs(config.log_level, exception_texts=True, process="cluster")
    workers: Workers = PlainCluster(config) if config.ray_address == "none" else RayCluster(config)
    stopping = asyncio.create_task(stop.wait())
    publishing = asyncio.create_task(_publish(workers, stop))
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


async def _publish(workers: Workers, stop: StopSignal) -> None:
    """Writes the ready line and every change of the serving workers to stdout, until the supervisor is
    lost."""
    await workers.open()
    stop.install()  # again: joining Ray replaces the handler of SIGTERM
    ready, published, answered = False, [""], asyncio.get_running_loop().time()
    while True:
        try:
            status = await workers.status()
        except UnresponsiveError as error:
            silent_s = asyncio.get_running_loop().time() - answered
            if silent_s > _SUPERVISOR_SILENT_S:
                message = f"the supervisor has not answered for {silent_s:.0f} s"
                raise BatonError(ErrorKind.UNAVAILABLE, message) from error
        else:
            answered = asyncio.get_running_loop().time()
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
