"""Which GPU Ray's homes give to whom, with Ray played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.cluster import ray_worker_processes as ray_homes
from baton.cluster.placement import Host
from baton.cluster.ray_worker_processes import RayHomes
from baton.cluster.report import Phase, Report
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig


class Remote:
    """A method of an actor's, which answers a moment later."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._method(*arguments)


class PlayedActor:
    def __init__(self) -> None:
        self.given: list[WorkerConfig] = []
        self.report = Remote(self._report)
        self.start = Remote(lambda text, number: self.given.append(WorkerConfig.model_validate_json(text)))

    def _report(self) -> dict[str, Any]:
        index = self.given[-1].engine.device_index if self.given else None
        phase = Phase.ENDED if self.given else Phase.EMPTY
        return Report(phase=phase, node="host", device_index=index).model_dump(mode="json")


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> tuple[RayHomes, list[PlayedActor], tuple[WorkerConfig, ...]]:
    async def hosts(work: Callable[[], Any], timeout_s: float = 1.0) -> list[Host]:
        return [Host("host", 2)]

    monkeypatch.setattr(ray_homes, "aside", hosts)
    workers = tuple(WorkerConfig(name=name, role="both", model="m") for name in "ab")
    homes = RayHomes(ClusterConfig(cluster_id="x", workers=workers), "ns", "")
    played = [PlayedActor() for _ in workers]
    monkeypatch.setattr(homes, "_actors", dict(zip("ab", played, strict=True)))
    return homes, played, workers


async def test_workers_that_start_in_the_same_moment_have_a_gpu_each(
    actors: tuple[RayHomes, list[PlayedActor], tuple[WorkerConfig, ...]],
) -> None:
    homes, played, workers = actors
    starts: list[Awaitable[None]] = [homes.start(worker, 1) for worker in workers]
    await asyncio.gather(*starts)
    assert [actor.given[0].engine.device_index for actor in played] == [0, 1]
    for worker in reversed(workers):
        await homes.start(worker, 2)
    assert [actor.given[1].engine.device_index for actor in played] == [0, 1], "a restart takes its own"
    assert {actor.given[1].engine.gpu_workers for actor in played} == {1}
