"""Worker processes in Ray actors, one a worker: placed where there is room, found by name, adopted where they
still run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from services.cluster.gpus.gpu_sharing import gpu_workers, least_used_gpus
from services.cluster.on_ray.ray_calls import CREATE_S, ActorGoneError, call_actor, find_actor, in_thread
from services.cluster.on_ray.rooms import MAX_PLACES, Node, find_room, first_free_place
from services.cluster.on_ray.worker_actor import WorkerActor
from services.cluster.supervision.report import Phase, Report
from services.cluster.supervision.supervisor import HostLostError, NoRoomError, UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig
from services.common.observability.logs import get_log

# Added to the time that a worker may take to drain.
_STOP_MARGIN_S = 2.0
# Seconds for which a node on which an actor did not answer is the last choice, unless one there answers
# again. Ray finds a dead node within them.
SILENT_NODE_S = 60.0

_log = get_log("supervisor")


class RayWorkerProcesses:
    """`WorkerProcesses` in this cluster's own Ray namespace. Unless they are detached, the actors end with
    this process."""

    def __init__(
        self,
        config: ClusterConfig,
        namespace: str,
        *,
        gpus: int = 0,
        stderr_socket: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gpus`: those of all nodes. `stderr_socket`: where actors get the stderr to write to; empty: Ray's
        files."""
        self._config = config
        self._namespace = namespace
        self._stderr_socket = stderr_socket
        self._clock = clock
        self._role_of: dict[str, Role] = {worker.name: worker.role for worker in config.workers}
        self._digests = {worker.name: digest(config, worker) for worker in config.workers}
        self._devices: dict[Role, int] = {
            worker.role: worker.engine.tensor_parallel for worker in config.workers
        }
        self._shares = _shares(config, gpus)
        self._actors: dict[str, ActorHandle[Any]] = {}
        # By the last reports: the node of each actor, the GPUs of its worker, and its place on the node.
        self._nodes: dict[str, str] = {}
        self._gpus: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, int] = {}
        self._stopping: set[str] = set()  # ids of Ray nodes that are about to end
        self._silent: dict[str, float] = {}  # ids of Ray nodes, and when an actor there was given up
        self._addresses: dict[str, str] = {}  # of Ray nodes, by id

    async def replace_outdated(self) -> None:
        """Drains and ends actors of an earlier supervisor whose worker is not wanted, or is wanted with
        another configuration. Raises UnresponsiveError where Ray does not answer."""
        prefix = actor_name("")
        names = await in_thread(lambda: ray.util.list_named_actors(all_namespaces=False))
        found = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        outdated = [name for name in found if await self._outdated(name)]
        for name in outdated:
            _log.warning("worker_config_stale", worker=name)
        await asyncio.gather(*(self._end(name) for name in outdated))

    async def report(self, name: str) -> Report | None:
        actor = self._actors.get(name) or await find_actor(actor_name(name), self._namespace)
        if actor is None:
            self._forget(name)
            return None
        self._actors[name] = actor
        try:
            report = Report.model_validate(await call_actor(actor.report.remote()))
        except ActorGoneError:
            self._forget(name)
            return None
        self._nodes[name], self._gpus[name] = report.node, report.device_indexes
        self._places[name] = report.place
        if self._silent.pop(report.node, None) is not None:
            _log.info("node_answers_again", node=self._addresses.get(report.node, report.node))
        if report.stopping:
            self._stopping.add(report.node)
            if report.phase in (Phase.EMPTY, Phase.ENDED):
                _log.info("worker_leaves_node", worker=name)
                await in_thread(partial(ray.kill, actor))
                self._forget(name)
                return None
        return report

    async def start(self, config: WorkerConfig, number: int) -> None:
        """Starts the worker on its node, or places it. Raises NoRoomError, HostLostError,
        UnresponsiveError."""
        nodes = [node for node in await in_thread(nodes_of_ray) if node.id not in self._stopping]
        self._addresses |= {node.id: node.address for node in nodes}
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
        indexes = self._gpus[config.name] = self._gpus_of(config, node, here)
        worker = config.on_gpus(indexes, self._sharing(config, node))
        if self._config.detached:
            worker = worker.at_place(place)
        actor = self._actors[config.name]
        await call_actor(actor.start.remote(worker.model_dump_json(), number, place))

    async def kill(self, name: str, *, actor: bool) -> None:
        handle = self._actors.get(name)
        if handle is None:
            return
        if actor:
            self._note_silent(self._nodes.get(name, ""))
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

    async def _place(self, config: WorkerConfig, nodes: list[Node]) -> None:
        """Creates the worker's actor where there is room. Raises NoRoomError, HostLostError."""
        placed: dict[str, list[Role]] = {}
        for name, node_id in self._nodes.items():
            placed.setdefault(node_id, []).append(self._role_of[name])
        if self._config.detached:  # each place has ports of its own
            nodes = [node for node in nodes if len(placed.get(node.id, ())) < MAX_PLACES]
        now = self._clock()
        self._silent = {node: since for node, since in self._silent.items() if now - since < SILENT_NODE_S}
        on_gpu = config.engine.device != "cpu" and (self._config.detached or any(node.gpus for node in nodes))
        chosen = find_room(
            config.role,
            nodes,
            placed,
            on_gpu=on_gpu,
            gpu_workers=self._shares,
            devices=self._devices,
            silent=self._silent,
        )
        if chosen is None:
            raise NoRoomError(f"no Ray node has room for one more {config.role} worker")
        self._nodes[config.name] = chosen.id  # so that workers placed meanwhile count it
        try:
            await self._make(config.name, chosen)
        except BaseException:
            self._forget(config.name)
            raise

    async def _make(self, name: str, node: Node) -> None:
        """Creates the actor on a Ray node, or finds an existing one; returns when it answers."""
        maker: Any = ray.remote(WorkerActor).options(
            name=actor_name(name),
            namespace=self._namespace,
            lifetime="detached" if self._config.detached else None,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        given = self._config.model_dump_json(), name, self._digests[name], self._stderr_socket
        actor: ActorHandle[Any] = await in_thread(partial(maker.remote, *given), CREATE_S)
        try:
            await call_actor(actor.report.remote(), CREATE_S)
        except (ActorGoneError, UnresponsiveError) as error:
            self._note_silent(node.id)
            with contextlib.suppress(UnresponsiveError):
                await in_thread(partial(ray.kill, actor))
            raise HostLostError(f"Ray node {node.address}: {error}") from error
        self._actors[name] = actor

    def _note_silent(self, node: str) -> None:
        """Makes a node the last choice for a while."""
        if node and node not in self._silent:
            _log.warning("node_silent", node=self._addresses.get(node, node))
            self._silent[node] = self._clock()

    def _sharing(self, config: WorkerConfig, node: Node) -> int:
        """Number of workers that share a GPU of the node once all its room is taken."""
        if not (node.declared and node.gpus) or config.engine.gpu_workers:
            return self._shares
        if config.engine.device_indexes:
            return sum(node.declared.values())
        needed = sum(count * self._devices.get(role, 1) for role, count in node.declared.items())
        return gpu_workers(needed, node.gpus)

    def _gpus_of(self, config: WorkerConfig, node: Node, here: list[str]) -> tuple[int, ...]:
        """The configured GPUs, else the least used ones of the node."""
        engine = config.engine
        if engine.device == "cpu" or engine.device_indexes:
            return engine.device_indexes
        used = [index for name in here for index in self._gpus.get(name, ())]
        return least_used_gpus(node.gpus, used, engine.tensor_parallel)

    async def _outdated(self, name: str) -> bool:
        """True if an actor is to be replaced; one that does not answer is left to supervision where its
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
        for known in (self._actors, self._nodes, self._gpus, self._places):
            known.pop(name, None)


def actor_name(worker: str) -> str:
    """The name of a worker's actor in its cluster's Ray namespace."""
    return f"worker-{worker}"


def nodes_of_ray() -> list[Node]:
    """The live nodes with their resources."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        Node(node["NodeID"], node["Resources"], node["NodeManagerAddress"]) for node in nodes if node["Alive"]
    ]


def digest(config: ClusterConfig, worker: WorkerConfig) -> str:
    """Identifies what a worker's actor and its worker are configured with, in 16 hex digits, wherever the
    supervisor runs."""
    own = {"workers", "name", "host", "admin_http_host", "admin_http_port"}
    text = config.model_dump_json(exclude=own) + worker.model_dump_json()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shares(config: ClusterConfig, gpus: int) -> int:
    """Number of workers that may share a GPU of a node that declares no room: as many as configured, else
    one. With `baton up` all share one where there is a single GPU, none is known, or it is configured."""
    engine = config.workers[0].engine
    alone = gpus > 1 and not engine.device_indexes
    return engine.gpu_workers or (1 if config.detached or alone else len(config.workers))
