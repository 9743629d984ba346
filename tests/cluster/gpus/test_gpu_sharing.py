"""GPUs are given out by index, and shared where they are too few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.base.errors import BatonError, ErrorKind
from services.cluster.gpus.gpu_sharing import gpu_workers, least_used_gpus, require_gpus
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import EngineConfig, WorkerConfig


def test_gpus_are_taken_in_turn_and_then_shared() -> None:
    used: list[int] = []
    for _ in range(5):
        used += least_used_gpus(2, used)
    assert used == [0, 1, 0, 1, 0]
    assert least_used_gpus(3, [0, 2]) == (1,)
    assert least_used_gpus(4, [0, 3, 3], 2) == (1, 2)
    assert least_used_gpus(0, []) == ()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20), st.integers(1, 8))
def test_no_gpu_has_more_workers_than_its_shares(devices: list[int], gpus: int) -> None:
    """Workers of several GPUs are placed too, and their GPUs are not one GPU twice."""
    devices = [min(count, gpus) for count in devices]
    taken: list[int] = []
    for count in devices:
        indexes = least_used_gpus(gpus, taken, count)
        assert len(set(indexes)) == count
        taken += indexes
    assert max(taken.count(index) for index in range(gpus)) == gpu_workers(sum(devices), gpus)


def test_without_a_named_gpu_all_may_share_one() -> None:
    assert gpu_workers(3, 0) == 3
    assert gpu_workers(0, 0) == gpu_workers(0, 4) == 1


def cluster(workers: int, engine: EngineConfig) -> ClusterConfig:
    config = WorkerConfig(name="w", role="both", model="m", engine=engine)
    return ClusterConfig(
        cluster_id="x",
        workers=tuple(config.model_copy(update={"name": f"w{index}"}) for index in range(workers)),
    )


@pytest.mark.parametrize(
    ("workers", "gpus", "engine"),
    [
        (2, 2, EngineConfig(device="cuda")),
        (5, 1, EngineConfig(device="cuda")),  # a single GPU is shared
        (4, 2, EngineConfig(gpu_workers=2)),
        (3, 2, EngineConfig(device_indexes=(0,))),  # all on the configured GPU
        (3, 2, EngineConfig(device="cpu")),
        (3, 0, EngineConfig(device="cuda")),  # the worker reports that there is none
        (2, 4, EngineConfig(tensor_parallel=2)),
        (3, 2, EngineConfig(tensor_parallel=2, gpu_workers=3)),
        (3, 1, EngineConfig(device="cpu", tensor_parallel=8)),
    ],
)
def test_there_are_gpus_enough(workers: int, gpus: int, engine: EngineConfig) -> None:
    require_gpus(cluster(workers, engine), gpus)


@pytest.mark.parametrize(
    ("workers", "gpus", "engine", "message"),
    [
        (
            3,
            2,
            EngineConfig(device="cuda"),
            "3 workers need a GPU, and there are 2: start fewer workers, or let 2",
        ),
        (
            5,
            2,
            EngineConfig(gpu_workers=2),
            "there are 2, each shared by at most 2: start fewer workers, or let 3 share",
        ),
        (2, 1, EngineConfig(gpu_workers=1), "there is 1, each shared by at most 1"),
        (
            3,
            4,
            EngineConfig(tensor_parallel=2),
            "3 workers need 6 GPUs, and there are 4: start fewer workers, or let 2 share",
        ),
        (
            1,
            2,
            EngineConfig(tensor_parallel=4),
            r"w0 needs 4 GPUs \(tensor_parallel\), and there are 2; 2 would be enough for tensor_parallel 2",
        ),
        (2, 1, EngineConfig(tensor_parallel=2, gpu_workers=4), "w0 needs 2 GPUs"),
    ],
)
def test_too_few_gpus_are_an_operators_mistake(
    workers: int, gpus: int, engine: EngineConfig, message: str
) -> None:
    with pytest.raises(BatonError, match=message) as caught:
        require_gpus(cluster(workers, engine), gpus)
    assert caught.value.kind is ErrorKind.INVALID
