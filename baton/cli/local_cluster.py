"""The processes of `baton up` on this machine: workers first, all at once, then the router.

    cluster = LocalCluster(config, model_folder)
    doors = await cluster.start()       every worker serves, then the router
    await cluster.failure()             returns when one of them ends unasked
    await cluster.stop(within_s=25)     the router drains, then the workers; none is left

Whoever calls `start` must call `stop`, whatever `start` did.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.cli.processes import Child, ChildError
from baton.cli.race import race
from services.common.config import Role, RouterConfig, UpConfig, WorkerConfig

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")

# Kept for the workers when the router takes all the time it has.
WORKERS_STOP_S = 3.0


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands that run a worker and the router."""

    worker: Sequence[str] = (sys.executable, "-m", "services.worker")
    router: Sequence[str] = (sys.executable, "-m", "services.router")


@dataclass(frozen=True, slots=True)
class Doors:
    """Where clients knock, each `host:port`."""

    http: str
    grpc: str


class LocalCluster:
    """Owns its children: nobody else starts, signals or reaps them."""

    def __init__(self, config: UpConfig, model: Path, programs: Programs | None = None) -> None:
        self._config = config
        self._model = model
        self._programs = programs or Programs()
        self._workers: list[Child] = []
        self._router: Child | None = None

    async def start(self) -> Doors:
        """Raises `BatonError` for what a child refuses, `ChildError` for one that fails."""
        for config in worker_configs(self._config, self._model):
            child = await Child.start(config.name, self._programs.worker, config.model_dump_json())
            self._workers.append(child)
        timeout_s = self._config.start_timeout_s
        said = await asyncio.gather(*(worker.ready(timeout_s) for worker in self._workers))
        router = router_config(self._config, self._model, [answer["grpc"] for answer in said])
        self._router = await Child.start("router", self._programs.router, router.model_dump_json())
        doors, failure = await race(self._router.ready(timeout_s), _first_failure(self._workers))
        if doors is None:
            assert failure is not None
            raise failure
        return Doors(http=doors["http"], grpc=doors["grpc"])

    async def failure(self) -> ChildError:
        """Waits for the first child that ends unasked."""
        return await _first_failure(self._children)

    async def stop(self, within_s: float) -> None:
        """Drains the router, then the workers, which have nothing to do by then; what is left after
        `within_s` is killed."""
        deadline = asyncio.get_running_loop().time() + within_s
        if self._router:
            await self._router.stop(deadline - WORKERS_STOP_S)
        await asyncio.gather(*(worker.stop(deadline) for worker in self._workers))

    def kill(self) -> None:
        """Stops everything at once; `stop` still has to be awaited."""
        for child in self._children:
            child.kill()

    @property
    def _children(self) -> list[Child]:
        return [*([self._router] if self._router else []), *self._workers]


async def _first_failure(children: Sequence[Child]) -> ChildError:
    ends = {asyncio.create_task(child.ended()): child for child in children}
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return await ends[done.pop()].death()
    finally:
        for end in ends:
            end.cancel()


def worker_configs(config: UpConfig, model: Path) -> list[WorkerConfig]:
    """One a worker, named by role and index: prefill-0, decode-0, …"""
    return [
        WorkerConfig(
            name=f"{role}-{index}",
            role=role,
            model=str(model),
            engine=config.engine,
            transfer=config.transfer,
            served_model_name=config.served_model_name,
            drain_s=config.drain_s,
            log_level=config.log_level,
        )
        for role in ROLES
        for index in range(config.role_counts[role])
    ]


def router_config(config: UpConfig, model: Path, workers: Sequence[str]) -> RouterConfig:
    """The door's configuration once its workers' addresses are known."""
    return RouterConfig(
        **config.router.model_dump(),
        model=str(model),
        served_model_name=config.served_model_name or model.name,
        workers=tuple(workers),
        drain_s=config.drain_s,
        log_level=config.log_level,
    )
