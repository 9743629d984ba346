"""Detached workers' processes on Ray: placed where there is room, adopted where they still run."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial

import ray

from services.cluster.detached.rooms import Node, find_room, first_free_place, gpu_share
from services.cluster.detached.worker_actor import DetachedWorkerActor
from services.cluster.placement import least_used_gpu
from services.cluster.ray_calls import ActorGoneError, call_actor, find_actor, in_thread
from services.cluster.ray_worker_processes import RayWorkerProcesses, actor_name
from services.cluster.report import Phase, Report
from services.cluster.supervision import NoRoomError, UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log

_log = get_log("supervisor")


class DetachedWorkerProcesses(RayWorkerProcesses):
    """`WorkerProcesses` whose actors stay where they are when this process ends."""

    actor_class = DetachedWorkerActor

    def __init__(self, config: ClusterConfig, namespace: str) -> None:
        super().__init__(config, namespace, stderr_socket="")
        self._role_of: dict[str, Role] = dict(self._roles)
        self._digests = {worker.name: digest(config, worker) for worker in config.workers}
        self._places: dict[str, int] = {}
        self._stopping: set[str] = set()  # ids of Ray nodes that are about to end

    async def replace_outdated(self) -> None:
        """Drains and ends actors of an earlier supervisor whose worker is not wanted, or is wanted with
        another configuration. Raises UnresponsiveError where Ray does not answer."""
        prefix = actor_name("")
        names = await in_thread(lambda: ray.util.list_named_actors(all_namespaces=False))
        found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        outdated = [name for name in found if await self._outdated(name)]
        for name in outdated:
            _log.warning("worker_outdated", worker=name)
        await asyncio.gather(*(self._end(name) for name in outdated))

    async def report(self, name: str) -> Report | None:
        report = await super().report(name)
        if report is None:
            self._forget(name)
            return None
        self._places[name] = report.place
        if report.stopping:
            self._stopping.add(report.node)
            if report.phase in (Phase.EMPTY, Phase.ENDED):
                _log.info("worker_leaves_node", worker=name)
                await self.kill(name, actor=True)
                self._actors.pop(name, None)
                self._forget(name)
                return None
        return report

    async def start(self, config: WorkerConfig, number: int) -> None:
        """Starts the worker on its node, or places it. Raises NoRoomError, UnresponsiveError."""
        nodes = [node for node in await in_thread(nodes_of_ray) if node.id not in self._stopping]
        if config.name not in self._actors:
            await self._place(config, nodes)
        report = await self.report(config.name)
        if report is None:
            return
        # Recorded before the next await, since other workers start concurrently.
        node = next((node for node in nodes if node.id == report.node), Node(report.node))
        here = [name for name, other in self._nodes.items() if other == node.id and name != config.name]
        place = first_free_place([self._places[name] for name in here if name in self._places])
        self._places[config.name] = place
        index = self._gpus[config.name] = self._gpu_of(config, node, here)
        worker = config.at_place(place).on_gpu(index, gpu_share(node, config.engine.gpu_workers))
        actor = self._actors[config.name]
        await call_actor(actor.start_at.remote(worker.model_dump_json(), number, place))

    async def _place(self, config: WorkerConfig, nodes: list[Node]) -> None:
        """Creates the worker's actor where there is room. Raises NoRoomError."""
        placed: dict[str, list[Role]] = {}
        for name, node_id in self._nodes.items():
            placed.setdefault(node_id, []).append(self._role_of[name])
        engine = config.engine
        chosen = find_room(
            config.role, nodes, placed, on_gpu=engine.device != "cpu", gpu_workers=engine.gpu_workers or 1
        )
        if chosen is None:
            raise NoRoomError(f"no Ray node has room for one more {config.role} worker")
        self._nodes[config.name] = chosen.id  # so that workers placed meanwhile count it
        try:
            await self._make(config.name, chosen.id, self._digests[config.name], soft=False)
        except BaseException:
            self._forget(config.name)
            raise

    def _gpu_of(self, config: WorkerConfig, node: Node, here: list[str]) -> int | None:
        if config.engine.device == "cpu" or config.engine.device_index is not None:
            return config.engine.device_index
        return least_used_gpu(
            node.gpus, [index for name in here if (index := self._gpus.get(name)) is not None]
        )

    async def _outdated(self, name: str) -> bool:
        """Whether an actor is to be replaced; one that does not answer is left to supervision where its
        worker is wanted."""
        if name not in self._digests:
            return True
        try:
            report = await self.report(name)
        except UnresponsiveError:
            return False
        return report is not None and report.digest != self._digests[name]

    async def _end(self, name: str) -> None:
        try:
            await self.stop(name, self._config.drain_s)
        except UnresponsiveError:
            actor = await find_actor(actor_name(name), self._namespace)
            if actor is not None:
                await in_thread(partial(ray.kill, actor))
        except ActorGoneError:
            pass
        self._forget(name)

    def _forget(self, name: str) -> None:
        """A worker without an actor takes no room."""
        for known in (self._nodes, self._gpus, self._places):
            known.pop(name, None)


def nodes_of_ray() -> list[Node]:
    """The live nodes with their resources."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [Node(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]]


def digest(config: ClusterConfig, worker: WorkerConfig) -> str:
    """Identifies what a worker's actor and its worker are configured with; 16 hex digits."""
    common = config.model_copy(update={"workers": ()})
    text = common.model_dump_json() + worker.model_dump_json()
    return hashlib.sha256(text.encode()).hexdigest()[:16]
