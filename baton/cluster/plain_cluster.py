"""The workers without Ray: supervised all the same, as children of this very process."""

from __future__ import annotations

import asyncio

from baton.cluster.placement import gpu_workers
from baton.cluster.report import ClusterStatus, Report
from baton.cluster.supervision import Supervision
from baton.cluster.worker_home import WorkerHome
from services.common.config import ClusterConfig, WorkerConfig


class LocalHomes:
    """`Homes` of a cluster of one machine."""

    def __init__(self, config: ClusterConfig) -> None:
        self._start_timeout_s = config.start_timeout_s
        self._homes = {worker.name: WorkerHome(config.worker_program) for worker in config.workers}
        # In turn; unless they are told how many there are, and nothing else, all take the same.
        told = [worker.engine.device_index for worker in config.workers]
        gpus = 0 if any(index is not None for index in told) else config.gpus or 0
        self._gpus = {w.name: n % gpus if gpus else told[n] for n, w in enumerate(config.workers)}
        self._gpu_workers = gpu_workers(len(config.workers), gpus)

    async def report(self, name: str) -> Report | None:
        return self._homes[name].report()

    async def start(self, config: WorkerConfig, number: int) -> None:
        worker = config.on_gpu(self._gpus[config.name], self._gpu_workers)
        self._homes[config.name].start(worker, number, self._start_timeout_s)

    async def kill(self, name: str, *, home: bool) -> None:
        self._homes[name].kill()

    async def stop(self, name: str, within_s: float) -> None:
        await self._homes[name].stop(within_s)


class PlainCluster:
    """`RayCluster` without Ray."""

    def __init__(self, config: ClusterConfig) -> None:
        self._supervision = Supervision(config, LocalHomes(config))
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._running = asyncio.create_task(self._supervision.run())

    async def status(self) -> ClusterStatus:
        assert self._running is not None
        if self._running.done():
            self._running.result()
        return self._supervision.status()

    async def stop(self, within_s: float) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._supervision.stop(within_s)

    async def close(self) -> None:
        """Nothing but the workers was ever started."""
