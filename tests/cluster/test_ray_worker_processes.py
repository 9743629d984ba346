"""Assignment of GPUs to worker actors, with a fake Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.cluster import ray_worker_processes
from services.cluster.placement import Host
from services.cluster.ray_worker_processes import RayWorkerProcesses
from services.cluster.report import Phase, Report
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig


class Remote:
    """An actor's method that answers in the next turn of the loop."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._method(*arguments)


class FakeActor:
    def __init__(self) -> None:
        self.given: list[WorkerConfig] = []
        self.report = Remote(self._report)
        self.start = Remote(lambda text, number: self.given.append(WorkerConfig.model_validate_json(text)))

    def _report(self) -> dict[str, Any]:
        index = self.given[-1].engine.device_index if self.given else None
        phase = Phase.ENDED if self.given else Phase.EMPTY
        return Report(phase=phase, node="host", device_index=index).model_dump(mode="json")


@pytest.fixture
def actors(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[RayWorkerProcesses, list[FakeActor], tuple[WorkerConfig, ...]]:
    async def hosts(work: Callable[[], Any], timeout_s: float = 1.0) -> list[Host]:
        return [Host("host", 2)]

    monkeypatch.setattr(ray_worker_processes, "in_thread", hosts)
    workers = tuple(WorkerConfig(name=name, role="both", model="m") for name in "ab")
    processes = RayWorkerProcesses(ClusterConfig(cluster_id="x", workers=workers), "ns", "")
    fakes = [FakeActor() for _ in workers]
    monkeypatch.setattr(processes, "_actors", dict(zip("ab", fakes, strict=True)))
    return processes, fakes, workers


async def test_workers_that_start_concurrently_get_a_gpu_each(
    actors: tuple[RayWorkerProcesses, list[FakeActor], tuple[WorkerConfig, ...]],
) -> None:
    processes, fakes, workers = actors
    starts: list[Awaitable[None]] = [processes.start(worker, 1) for worker in workers]
    await asyncio.gather(*starts)
    assert [actor.given[0].engine.device_index for actor in fakes] == [0, 1]
    for worker in reversed(workers):
        await processes.start(worker, 2)
    assert [actor.given[1].engine.device_index for actor in fakes] == [0, 1], (
        "a restarted worker keeps its GPU"
    )
    assert {actor.given[1].engine.gpu_workers for actor in fakes} == {1}
