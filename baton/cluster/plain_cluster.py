"""The workers without Ray: supervised all the same, as children of this very process."""

from __future__ import annotations

import asyncio

from baton.cluster.gpus import gpus_here
from baton.cluster.placement import gpu_workers, require_gpus
from baton.cluster.report import ClusterStatus, Report
from baton.cluster.supervision import Supervision
from baton.cluster.worker_process import WorkerHome
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig


class LocalHomes:
    """`Homes` of a cluster of one machine; its GPUs are dealt out in turn, for good."""

    def __init__(self, config: ClusterConfig, gpus: int) -> None:
        self._start_timeout_s = config.start_timeout_s
        self._homes = {worker.name: WorkerHome(config.worker_program) for worker in config.workers}
        told = config.workers[0].engine.device_index
        self._gpus = {
            worker.name: number % gpus if told is None and gpus else told
            for number, worker in enumerate(config.workers)
        }
        self._gpu_workers = gpu_workers(len(config.workers), gpus if told is None else 0)

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
        self._config = config
        self._supervision: Supervision | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises BatonError: INVALID where there are too few GPUs, UNAVAILABLE where nobody says how many."""
        gpus = await gpus_here(self._config)
        require_gpus(self._config, gpus)
        self._supervision = Supervision(self._config, LocalHomes(self._config, gpus))
        self._running = asyncio.create_task(self._supervision.run())

    async def status(self) -> ClusterStatus:
        assert self._supervision is not None
        assert self._running is not None
        if self._running.done():
            self._running.result()
        return self._supervision.status()

    async def stop(self, within_s: float) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._supervision is not None:
            await self._supervision.stop(within_s)

    async def close(self) -> None:
        """Nothing but the workers was ever started."""
