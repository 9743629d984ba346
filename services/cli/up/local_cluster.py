"""The processes of `baton up`: `services.cluster`, which runs the workers, the router, and an embedded Redis.

    cluster = LocalCluster(config, model_folder)
    addresses = await cluster.start()   returns once every worker serves and the router has found them
    await cluster.failure()             returns when the workers' process ends, or the router too often
    await cluster.stop(within_s=25)     ends the router, the workers and Redis, in this order

After `start`, even a failed one, `stop` must be called.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from baton.base.cluster_auth import prefix_secret
from baton.base.errors import BatonError
from baton.base.python_module import python_module
from services.cli.common import process_configs
from services.cli.up.embedded_redis import EmbeddedRedis
from services.cli.up.router_process import RouterProcess
from services.common.config.cluster import ClusterConfig
from services.common.config.router import RouterConfig
from services.common.config.settings_tree.settings import Settings
from services.common.config.state import NO_STATE, StateConfig
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig
from services.common.processes.child_process import Child, ChildError

T = TypeVar("T")
U = TypeVar("U")

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")

# Part of the time of a stop that is reserved for the workers.
WORKERS_STOP_S = 3.0
# Time for Ray and its supervisor in addition to the workers' own start.
SUPERVISOR_START_S = 240.0


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands that run the workers' supervisor, a worker (empty: its own choice) and the router."""

    cluster: Sequence[str] = python_module("services.cluster")
    worker: Sequence[str] = ()
    router: Sequence[str] = python_module("services.router")


@dataclass(frozen=True, slots=True)
class Addresses:
    """The router's listeners, each `host:port`: two public ones and two for operators."""

    http: str
    grpc: str
    admin: str  # AdminService
    admin_http: str  # metrics and health


class LocalCluster:
    """Owns the child processes; only this class starts, signals and reaps them."""

    def __init__(self, config: Settings, model: Path, programs: Programs | None = None) -> None:
        self._config = config
        self._model = model
        self._programs = programs or Programs()
        self._cluster: Child | None = None
        self._router: RouterProcess | None = None
        self._redis: EmbeddedRedis | None = None

    async def start(self) -> Addresses:
        """Starts everything. Raises `BatonError` where a child refuses its configuration, `ChildError` where
        it fails."""
        if self._config.state.redis_url is None:
            self._redis = EmbeddedRedis(self._send_restarts)
        cluster_id = secrets.token_hex(4)
        self._config = with_generated_secrets(self._config)
        state = state_config(self._config, cluster_id, self._redis)
        workers = cluster_config(self._config, self._model, cluster_id, state, self._programs.worker)
        router = router_config(self._config, self._model, state)
        self._cluster = await Child.start(
            "cluster",
            self._programs.cluster,
            workers.model_dump_json(),
            error_prefix="",  # its errors name workers themselves
            on_message=self._forward,
        )
        self._router = RouterProcess(self._programs.router, router, self._config.router_restarts)
        await self._router.spawn()
        serving = asyncio.Event()
        addresses, failure = await first_of(self._start_router(serving), self._cluster_failure(serving))
        if addresses is None:
            assert failure is not None
            raise failure
        return addresses

    async def failure(self) -> BatonError | ChildError:
        """Waits until the workers' process ends, or the router has ended too often."""
        assert self._cluster is not None
        assert self._router is not None
        ended, abandoned = await first_of(_death(self._cluster), self._router.failure())
        failure = ended or abandoned
        assert failure is not None
        return failure

    async def stop(self, within_s: float) -> None:
        """Drains the router, then the workers; kills what is left after `within_s` seconds."""
        deadline = asyncio.get_running_loop().time() + within_s
        if self._router:
            await self._router.stop(deadline - WORKERS_STOP_S)
        if self._cluster:
            await self._cluster.stop(deadline)
        if self._redis:
            await self._redis.stop()

    def kill(self) -> None:
        """Stops everything at once; `stop` still has to be awaited."""
        for child in (self._router, self._cluster):
            if child is not None:
                child.kill()

    async def _start_router(self, serving: asyncio.Event) -> Addresses:
        """Returns the router's addresses once it is ready and every worker serves."""
        assert self._router is not None
        if self._redis:
            await self._redis.start()
        ready = await self._router.ready(self._config.start_timeout_s + SUPERVISOR_START_S)
        await serving.wait()
        return Addresses(**ready)

    async def _cluster_failure(self, serving: asyncio.Event) -> ChildError:
        """Sets `serving` once every worker serves, then waits until the process that runs them ends."""
        assert self._cluster is not None
        await self._cluster.ready(self._config.start_timeout_s + SUPERVISOR_START_S)
        serving.set()
        return await _death(self._cluster)

    def _forward(self, message: Mapping[str, Any]) -> None:
        """Forwards changes of the serving workers to the router."""
        if self._router and "workers" in message:
            self._router.send(message)

    def _send_restarts(self, restarts: int) -> None:
        if self._router:
            self._router.send({"store_restarts": restarts})


async def first_of(work: Awaitable[T], other: Awaitable[U]) -> tuple[T | None, U | None]:
    """Returns `(result of work, None)` or `(None, result of other)`, whichever ends first; `work` wins a tie.
    The other is cancelled and has ended when this returns. An exception of the first is raised."""
    left, right = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait({left, right}, return_when=asyncio.FIRST_COMPLETED)
        return (left.result(), None) if left.done() else (None, right.result())
    finally:
        left.cancel()
        right.cancel()
        await asyncio.gather(left, right, return_exceptions=True)


async def _death(child: Child) -> ChildError:
    await child.ended()
    return await child.death()


def with_generated_secrets(config: Settings) -> Settings:
    """The configuration with random secrets where it has none, unless workers run on another Ray, whose
    machines cannot be given them."""
    if config.supervision.on_another_ray:
        return config
    cluster_secret = config.cluster_secret or secrets.token_hex(32)
    hashing = config.prefix_secret or prefix_secret(cluster_secret)
    generated = {"prefix_secret": hashing, "cluster_secret": cluster_secret}
    return config.model_copy(update=generated)


def state_config(config: Settings, cluster_id: str, redis: EmbeddedRedis | None) -> StateConfig | None:
    """Returns the configuration of the soft state of router and workers; None without state."""
    url = redis.url if redis else config.state.redis_url
    if url is None or url == NO_STATE:
        return None
    return StateConfig(
        redis_url=url,
        namespace=config.state.namespace or f"baton-{cluster_id}",
        cluster_id=cluster_id,
        embedded=redis is not None,
        journal_key=secrets.token_hex(32),
    )


def cluster_config(
    config: Settings,
    model: Path,
    cluster_id: str,
    state: StateConfig | None = None,
    worker_program: Sequence[str] = (),
) -> ClusterConfig:
    """The configuration of the process that runs the workers."""
    return ClusterConfig(
        **config.supervision.model_dump(),
        cluster_id=cluster_id,
        workers=tuple(worker_configs(config, model, state, cluster_id)),
        worker_program=tuple(worker_program),
        start_timeout_s=config.start_timeout_s,
        drain_s=config.drain_s,
        log_level=config.log_level,
    )


def worker_configs(
    config: Settings, model: Path, state: StateConfig | None = None, cluster_id: str = ""
) -> list[WorkerConfig]:
    """The configuration of each worker, named by role and index: prefill-0, decode-0, …"""
    if state is not None:
        # Machines of another Ray cannot reach the embedded Redis; only the router has the journal's key.
        unreachable = state.embedded and config.supervision.on_another_ray
        state = None if unreachable else state.model_copy(update={"journal_key": ""})
    first = config.worker_metrics_port
    names = [(role, index) for role in ROLES for index in range(config.role_counts[role])]
    # On another Ray each machine has secrets of its own, or none.
    hashing = config.prefix_secret or ""
    return [
        process_configs.worker_config(
            config,
            role,
            name=f"{role}-{index}",
            cluster_id=cluster_id,
            model=str(model),
            transfer=config.transfer.of_worker(index),
            metrics_port=first and first + place,
            state=state,
            prefix_secret=hashing,
            drain_s=config.drain_s,
        )
        for place, (role, index) in enumerate(names)
    ]


def router_config(config: Settings, model: Path, state: StateConfig | None = None) -> RouterConfig:
    """The router's configuration; it is sent the workers' addresses later, over stdin."""
    router = process_configs.router_config(config, model, model.name, state)
    return router.model_copy(update={"prefix_secret": config.prefix_secret or ""})
