"""Runs the workers without Ray, as children of this process, under the same supervision."""

from __future__ import annotations

from services.cluster.gpus.available_gpus import available_gpus
from services.cluster.gpus.gpu_sharing import gpu_workers, least_used_gpus, require_gpus
from services.cluster.supervision.report import Report
from services.cluster.supervision.supervised import SupervisedCluster
from services.cluster.supervision.supervisor import Supervision
from services.cluster.supervision.worker_process import WorkerProcess
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig


class LocalWorkerProcesses:
    """`WorkerProcesses` on this machine; each worker is assigned its GPUs once, in turn."""

    def __init__(self, config: ClusterConfig, gpus: int) -> None:
        self._start_timeout_s = config.start_timeout_s
        self._processes = {worker.name: WorkerProcess(config.worker_program) for worker in config.workers}
        configured, used = config.workers[0].engine.device_indexes, list[int]()
        self._gpus: dict[str, tuple[int, ...]] = {}
        for worker in config.workers:
            indexes = configured or least_used_gpus(gpus, used, worker.engine.tensor_parallel)
            self._gpus[worker.name] = indexes
            used += indexes
        known = gpus and not configured
        self._gpu_workers = gpu_workers(config.gpus_needed, gpus) if known else len(config.workers)

    async def report(self, name: str) -> Report | None:
        return self._processes[name].report()

    async def start(self, config: WorkerConfig, number: int) -> None:
        worker = config.on_gpus(self._gpus[config.name], self._gpu_workers)
        self._processes[config.name].start(worker, number, self._start_timeout_s)

    async def kill(self, name: str, *, actor: bool) -> None:
        self._processes[name].kill()

    async def stop(self, name: str, within_s: float) -> None:
        await self._processes[name].stop(within_s)


class PlainCluster(SupervisedCluster):
    """The counterpart of `RayCluster` for one machine."""

    async def _start(self) -> Supervision:
        """Raises BatonError: INVALID where there are too few GPUs, UNAVAILABLE where the driver does not
        answer."""
        gpus = await available_gpus(self._config)
        require_gpus(self._config, gpus)
        return Supervision(self._config, LocalWorkerProcesses(self._config, gpus))
