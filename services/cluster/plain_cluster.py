"""Runs the workers without Ray, as children of this process, under the same supervision."""

from __future__ import annotations

import asyncio

from services.cluster.gpus import available_gpus
from services.cluster.placement import gpu_workers, require_gpus
from services.cluster.report import ClusterStatus, Report
from services.cluster.supervision import Supervision
from services.cluster.worker_process import WorkerProcess
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig


class LocalWorkerProcesses:
    """`WorkerProcesses` on this machine; each worker is assigned a GPU once, in turn."""

    def __init__(self, config: ClusterConfig, gpus: int) -> None:
        self._start_timeout_s = config.start_timeout_s
        self._processes = {worker.name: WorkerProcess(config.worker_program) for worker in config.workers}
        configured = config.workers[0].engine.device_index
        self._gpus = {
            worker.name: number % gpus if configured is None and gpus else configured
            for number, worker in enumerate(config.workers)
        }
        self._gpu_workers = gpu_workers(len(config.workers), gpus if configured is None else 0)

    async def report(self, name: str) -> Report | None:
        return self._processes[name].report()

    async def start(self, config: WorkerConfig, number: int) -> None:
        worker = config.on_gpu(self._gpus[config.name], self._gpu_workers)
        self._processes[config.name].start(worker, number, self._start_timeout_s)

    async def kill(self, name: str, *, actor: bool) -> None:
        self._processes[name].kill()

    async def stop(self, name: str, within_s: float) -> None:
        await self._processes[name].stop(within_s)


class PlainCluster:
    """The counterpart of `RayCluster` for one machine."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._supervision: Supervision | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts supervision. Raises BatonError: INVALID where there are too few GPUs, UNAVAILABLE where the
        driver does not answer."""
        gpus = await available_gpus(self._config)
        require_gpus(self._config, gpus)
        self._supervision = Supervision(self._config, LocalWorkerProcesses(self._config, gpus))
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
        """Does nothing: only workers were started."""
