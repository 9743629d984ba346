"""`python -m baton.cluster`: ClusterConfig as JSON on stdin; runs its workers until told to stop.

stdout   the ready line once every worker serves, or an error; then `{"workers": ["host:port", …]}` whenever
         the list of those that serve has changed
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Protocol

from baton.cluster.plain_cluster import PlainCluster
from baton.cluster.ray_cluster import RayCluster
from baton.cluster.report import ClusterStatus
from baton.cluster.supervision import HomeSilentError
from baton.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import configure_logs
from services.common.processes.child_protocol import StopSignal, report, report_ready, run_child

POLL_S = 0.1
STARTING_POLL_S = 0.03
# Longer than Ray takes to bring the supervisor back on a machine that is busy with other things.
_SUPERVISOR_AWAY_S = 60.0
# What a worker takes to end once it has drained.
_END_S = 2.0


class Workers(Protocol):
    """Whoever runs the workers."""

    async def open(self) -> None: ...
    async def status(self) -> ClusterStatus: ...
    async def stop(self, within_s: float) -> None: ...
    async def close(self) -> None: ...


async def serve(config: ClusterConfig, stop: StopSignal) -> None:
    """Raises the BatonError for which a worker does not start, or for which no more are watched."""
    configure_logs(config.log_level, process="cluster")
    workers: Workers = PlainCluster(config) if config.ray_address == "none" else RayCluster(config)
    stopping = asyncio.create_task(stop.wait())
    telling = asyncio.create_task(_tell(workers, stop))
    within_s = 0.0
    try:
        await asyncio.wait({stopping, telling}, return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            await telling
        within_s = config.drain_s + _END_S
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await workers.stop(within_s)
        await workers.close()


async def _tell(workers: Workers, stop: StopSignal) -> None:
    """Tells the parent of the workers for as long as they can be asked."""
    await workers.open()
    stop.install()  # once more: joining Ray takes SIGTERM for itself
    ready, told, heard = False, [""], asyncio.get_running_loop().time()
    while True:
        try:
            status = await workers.status()
        except HomeSilentError as error:
            away_s = asyncio.get_running_loop().time() - heard
            if away_s > _SUPERVISOR_AWAY_S:
                message = f"the supervisor has not answered for {away_s:.0f} s"
                raise BatonError(ErrorKind.UNAVAILABLE, message) from error
        else:
            heard = asyncio.get_running_loop().time()
            if not ready and status.failure:
                raise status.failure.error()
            if not ready and status.serving:
                ready = True
                report_ready({})
            if ready and status.settled and status.addresses != told:
                told = status.addresses
                report({"workers": told})
        await asyncio.sleep(POLL_S if ready else STARTING_POLL_S)


if __name__ == "__main__":
    code = run_child(ClusterConfig, serve)
    sys.stderr.flush()
    os._exit(code)  # Ray's own exit handlers would look for the Ray that has just been ended
