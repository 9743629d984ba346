"""Worker processes in Ray actors: one actor per worker, found by name and created on the host that
placement chose."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from services.cluster.placement import Host, gpu_workers, least_used_gpu, place
from services.cluster.ray_calls import CREATE_S, ActorGoneError, call_actor, find_actor, in_thread
from services.cluster.report import Report
from services.cluster.worker_actor import WorkerActor
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig

# Added to the time that a worker may take to drain.
_STOP_MARGIN_S = 2.0


class RayWorkerProcesses:
    """`WorkerProcesses` in this cluster's own Ray namespace."""

    actor_class: type[WorkerActor] = WorkerActor

    def __init__(self, config: ClusterConfig, namespace: str, stderr_socket: str) -> None:
        self._config = config
        self._roles = [(worker.name, worker.role) for worker in config.workers]
        self._namespace = namespace
        self._stderr_socket = stderr_socket
        self._actors: dict[str, ActorHandle[Any]] = {}
        # The node of each actor, by its last report, and the GPU of its worker.
        self._nodes: dict[str, str] = {}
        self._gpus: dict[str, int | None] = {}

    async def report(self, name: str) -> Report | None:
        actor = self._actors.get(name) or await find_actor(actor_name(name), self._namespace)
        if actor is None:
            return None
        self._actors[name] = actor
        try:
            report = Report.model_validate(await call_actor(actor.report.remote()))
        except ActorGoneError:
            del self._actors[name]
            return None
        self._nodes[name], self._gpus[name] = report.node, report.device_index
        return report

    async def start(self, config: WorkerConfig, number: int) -> None:
        hosts = await in_thread(hosts_of_ray)
        if config.name not in self._actors:
            node = place(self._roles, hosts, self._nodes, self._on_gpu(hosts))[config.name]
            await self._make(config.name, node)
        report = await self.report(config.name)
        if report is not None:
            # Recorded before the next await, since other workers start concurrently.
            index = self._gpus[config.name] = self._gpu(config, report.node, hosts)
            worker = config.on_gpu(index, self._gpu_workers(config, report.node, hosts))
            await call_actor(self._actors[config.name].start.remote(worker.model_dump_json(), number))

    async def kill(self, name: str, *, actor: bool) -> None:
        handle = self._actors.get(name)
        if handle is None:
            return
        if actor:
            await in_thread(partial(ray.kill, handle))
        else:
            await call_actor(handle.kill.remote())

    async def stop(self, name: str, within_s: float) -> None:
        actor = self._actors.pop(name, None) or await find_actor(actor_name(name), self._namespace)
        if actor is None:
            return
        try:
            await call_actor(actor.stop.remote(within_s), within_s + _STOP_MARGIN_S)
        except ActorGoneError:
            return
        finally:
            await in_thread(partial(ray.kill, actor))

    async def _make(self, name: str, node: str, *arguments: str, soft: bool = True) -> None:
        """Creates the actor on a Ray node, with further arguments of its constructor, or finds an existing
        one; returns when it answers. `soft`: on another node where this one is lost."""
        maker: Any = ray.remote(self.actor_class).options(
            name=actor_name(name),
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=soft),
        )
        common = (self._config.model_dump_json(), name, self._namespace, self._stderr_socket)
        make = partial(maker.remote, *common, *arguments)
        actor: ActorHandle[Any] = await in_thread(make, CREATE_S)
        await call_actor(actor.report.remote(), CREATE_S)
        self._actors[name] = actor

    def _gpu_workers(self, config: WorkerConfig, node: str, hosts: list[Host]) -> int:
        """The number of workers that share this worker's GPU once all are placed."""
        where = place(self._roles, hosts, self._nodes, self._on_gpu(hosts))
        here = sum(other == node for other in where.values())
        configured = config.engine.device_index is not None
        return gpu_workers(here, 0 if configured else _gpus(node, hosts))

    def _on_gpu(self, hosts: list[Host]) -> bool:
        return self._config.workers[0].engine.device != "cpu" and any(host.gpus for host in hosts)

    def _gpu(self, config: WorkerConfig, node: str, hosts: list[Host]) -> int | None:
        """The configured GPU, else the least used one of that host."""
        if config.engine.device == "cpu" or config.engine.device_index is not None:
            return config.engine.device_index
        here = [name for name, other in self._nodes.items() if other == node and name != config.name]
        return least_used_gpu(
            _gpus(node, hosts), [index for name in here if (index := self._gpus.get(name)) is not None]
        )


def actor_name(worker: str) -> str:
    """The name of a worker's actor in its cluster's Ray namespace."""
    return f"worker-{worker}"


def _gpus(node: str, hosts: list[Host]) -> int:
    return next((host.gpus for host in hosts if host.id == node), 0)


def hosts_of_ray() -> list[Host]:
    """The live nodes with the number of GPUs that Ray reports for each."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [Host(node["NodeID"], int(node["Resources"].get("GPU", 0))) for node in nodes if node["Alive"]]
