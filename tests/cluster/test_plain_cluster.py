"""Workers without Ray."""

from __future__ import annotations

import pytest

from baton.cluster.plain_cluster import LocalHomes
from baton.cluster.worker_home import WorkerHome
from services.common.config import ClusterConfig, WorkerConfig


async def test_each_is_told_with_how_many_it_shares_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerConfig] = []
    monkeypatch.setattr(WorkerHome, "start", lambda home, config, number, timeout_s: started.append(config))
    workers = tuple(WorkerConfig(name=name, role="both", model="m") for name in ("a", "b", "c"))
    homes = LocalHomes(ClusterConfig(cluster_id="x", workers=workers))
    for worker in workers:
        await homes.start(worker, 1)
    assert [worker.engine.gpu_workers for worker in started] == [3, 3, 3]
