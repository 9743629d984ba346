"""Workers without Ray: each is assigned a GPU, the same one at every start."""

from __future__ import annotations

import pytest

from baton.base.errors import BatonError
from services.cluster import plain_cluster
from services.cluster.plain_cluster import LocalWorkerProcesses, PlainCluster
from services.cluster.supervision.worker_process import WorkerProcess
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import EngineConfig, WorkerConfig


def cluster(names: str, engine: EngineConfig | None = None) -> ClusterConfig:
    workers = (
        WorkerConfig(name=name, role="both", model="m", engine=engine or EngineConfig()) for name in names
    )
    return ClusterConfig(cluster_id="x", workers=tuple(workers))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    started_with: list[WorkerConfig] = []
    monkeypatch.setattr(
        WorkerProcess, "start", lambda process, config, number, timeout_s: started_with.append(config)
    )
    return started_with


@pytest.mark.parametrize(
    ("gpus", "engine", "indexes", "sharing"),
    [
        (3, EngineConfig(), [(0,), (1,), (2,)], 1),
        (8, EngineConfig(), [(0,), (1,), (2,)], 1),
        (2, EngineConfig(gpu_workers=2), [(0,), (1,), (0,)], 2),
        (1, EngineConfig(), [(0,)] * 3, 3),
        (0, EngineConfig(), [()] * 3, 3),
        (2, EngineConfig(device_indexes=(1,)), [(1,)] * 3, 3),
        (6, EngineConfig(tensor_parallel=2), [(0, 1), (2, 3), (4, 5)], 1),
        (0, EngineConfig(tensor_parallel=2), [()] * 3, 3),
        (4, EngineConfig(tensor_parallel=2, device_indexes=(1, 3)), [(1, 3)] * 3, 3),
        (4, EngineConfig(tensor_parallel=2, gpu_workers=2), [(0, 1), (2, 3), (0, 1)], 2),
    ],
)
async def test_gpus_are_assigned_in_turn(
    gpus: int, engine: EngineConfig, indexes: list[tuple[int, ...]], sharing: int, started: list[WorkerConfig]
) -> None:
    config = cluster("abc", engine)
    processes = LocalWorkerProcesses(config, gpus)
    for worker in config.workers:
        await processes.start(worker, 1)
    assert [worker.engine.device_indexes for worker in started] == indexes
    assert [worker.engine.gpu_workers for worker in started] == [sharing] * 3


async def test_a_restarted_worker_has_its_gpu_again(started: list[WorkerConfig]) -> None:
    config = cluster("ab")
    processes = LocalWorkerProcesses(config, 2)
    for worker, number in ((0, 1), (1, 1), (1, 2), (0, 2), (1, 3)):
        await processes.start(config.workers[worker], number)
    assert [(worker.name, *worker.engine.device_indexes) for worker in started] == [
        ("a", 0), ("b", 1), ("b", 1), ("a", 0), ("b", 1),
    ]  # fmt: skip


async def test_too_few_gpus_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, started: list[WorkerConfig]
) -> None:
    async def two(config: ClusterConfig) -> int:
        return 2

    monkeypatch.setattr(plain_cluster, "available_gpus", two)
    refused = PlainCluster(cluster("abc"))
    with pytest.raises(BatonError, match="3 workers need a GPU, and there are 2"):
        await refused.open()
    await refused.stop(0)
    assert not started
