"""Workers without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from baton.cluster.plain_cluster import LocalHomes
from baton.cluster.worker_home import WorkerHome
from services.common.config import ClusterConfig, EngineConfig, WorkerConfig


async def placed(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[int | None, int | None]]:
    """GPU and number of sharers of three workers."""
    started: list[WorkerConfig] = []
    monkeypatch.setattr(WorkerHome, "start", lambda home, config, number, timeout_s: started.append(config))
    engine = EngineConfig(device_index=settings.pop("device_index", None))
    workers = tuple(
        WorkerConfig(name=name, role="both", model="m", engine=engine) for name in ("a", "b", "c")
    )
    homes = LocalHomes(ClusterConfig(cluster_id="x", workers=workers, **settings))
    for worker in workers:
        await homes.start(worker, 1)
    return [(worker.engine.device_index, worker.engine.gpu_workers) for worker in started]


async def test_each_is_told_with_how_many_it_shares_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await placed(monkeypatch) == [(None, 3)] * 3
    assert await placed(monkeypatch, device_index=1) == [(1, 3)] * 3


async def test_gpus_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await placed(monkeypatch, gpus=2) == [(0, 2), (1, 2), (0, 2)]
    assert await placed(monkeypatch, gpus=2, device_index=1) == [(1, 3)] * 3
    assert await placed(monkeypatch, gpus=4) == [(0, 1), (1, 1), (2, 1)]
