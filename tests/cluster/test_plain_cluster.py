"""Workers without Ray: each has its GPU, the same one at every start."""

from __future__ import annotations

import pytest

from baton.cluster import plain_cluster
from baton.cluster.plain_cluster import LocalHomes, PlainCluster
from baton.cluster.worker_process import WorkerHome
from baton.errors import BatonError
from services.common.config.cluster import ClusterConfig
from services.common.config.engine import EngineConfig
from services.common.config.worker import WorkerConfig


def cluster(names: str, engine: EngineConfig | None = None) -> ClusterConfig:
    workers = (
        WorkerConfig(name=name, role="both", model="m", engine=engine or EngineConfig()) for name in names
    )
    return ClusterConfig(cluster_id="x", workers=tuple(workers))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    told: list[WorkerConfig] = []
    monkeypatch.setattr(WorkerHome, "start", lambda home, config, number, timeout_s: told.append(config))
    return told


@pytest.mark.parametrize(
    ("gpus", "engine", "indices", "sharing"),
    [
        (3, EngineConfig(), [0, 1, 2], 1),
        (8, EngineConfig(), [0, 1, 2], 1),
        (2, EngineConfig(gpu_workers=2), [0, 1, 0], 2),
        (1, EngineConfig(), [0, 0, 0], 3),
        (0, EngineConfig(), [None, None, None], 3),
        (2, EngineConfig(device_index=1), [1, 1, 1], 3),
    ],
)
async def test_gpus_are_dealt_out(
    gpus: int, engine: EngineConfig, indices: list[int | None], sharing: int, started: list[WorkerConfig]
) -> None:
    config = cluster("abc", engine)
    homes = LocalHomes(config, gpus)
    for worker in config.workers:
        await homes.start(worker, 1)
    assert [worker.engine.device_index for worker in started] == indices
    assert [worker.engine.gpu_workers for worker in started] == [sharing] * 3


async def test_a_restarted_worker_has_its_gpu_again(started: list[WorkerConfig]) -> None:
    config = cluster("ab")
    homes = LocalHomes(config, 2)
    for worker, number in ((0, 1), (1, 1), (1, 2), (0, 2), (1, 3)):
        await homes.start(config.workers[worker], number)
    assert [(worker.name, worker.engine.device_index) for worker in started] == [
        ("a", 0), ("b", 1), ("b", 1), ("a", 0), ("b", 1),
    ]  # fmt: skip


async def test_too_few_gpus_are_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, started: list[WorkerConfig]
) -> None:
    async def two(config: ClusterConfig) -> int:
        return 2

    monkeypatch.setattr(plain_cluster, "gpus_here", two)
    refused = PlainCluster(cluster("abc"))
    with pytest.raises(BatonError, match="3 workers want a GPU, and there are 2"):
        await refused.open()
    await refused.stop(0)
    assert not started
