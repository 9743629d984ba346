"""Pairs meet on one host where they can, and GPUs are shared out by index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.base.errors import BatonError, ErrorKind
from services.cluster.placement import Host, gpu_workers, least_used_gpu, place, require_gpus
from services.common.config.cluster import ClusterConfig
from services.common.config.types import Role
from services.common.config.worker import EngineConfig, WorkerConfig

PAIR: list[tuple[str, Role]] = [("prefill-0", "prefill"), ("decode-0", "decode")]
PAIRS: list[tuple[str, Role]] = [*PAIR, ("prefill-1", "prefill"), ("decode-1", "decode")]
ROLES = st.sampled_from(["prefill", "decode", "both"])


def test_a_pair_shares_a_host_and_the_next_takes_another() -> None:
    where = place(PAIRS, [Host("a", 2), Host("b", 2)], {}, on_gpu=True)
    assert where["prefill-0"] == where["decode-0"]
    assert where["prefill-1"] == where["decode-1"]
    assert where["prefill-0"] != where["prefill-1"]


def test_a_pair_is_parted_where_a_host_has_one_gpu() -> None:
    where = place(PAIR, [Host("a", 1), Host("b", 1)], {}, on_gpu=True)
    assert where["prefill-0"] != where["decode-0"]


def test_a_host_without_gpu_is_the_last_choice() -> None:
    where = place(PAIR, [Host("a", 0), Host("b", 2)], {}, on_gpu=True)
    assert set(where.values()) == {"b"}


def test_the_living_stay_and_the_restarted_joins_its_partner() -> None:
    hosts = [Host("a", 2), Host("b", 2)]
    where = place(PAIRS, hosts, {"prefill-0": "b", "prefill-1": "a", "decode-1": "a"}, on_gpu=True)
    assert where == {"prefill-0": "b", "decode-0": "b", "prefill-1": "a", "decode-1": "a"}


def test_a_lost_host_is_left() -> None:
    assert place(PAIR, [Host("a", 0)], {"prefill-0": "gone"}, on_gpu=False)["prefill-0"] == "a"


def test_no_host() -> None:
    with pytest.raises(ValueError, match="no hosts"):
        place(PAIR, [], {}, on_gpu=False)


@given(
    roles=st.lists(ROLES, min_size=1, max_size=12),
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    on_gpu=st.booleans(),
)
def test_everyone_has_a_host_and_gpus_are_full_only_when_all_are(
    roles: list[Role], gpus: list[int], on_gpu: bool
) -> None:
    hosts = [Host(f"h{index}", count) for index, count in enumerate(gpus)]
    wanted = [(f"{role}-{index}", role) for index, role in enumerate(roles)]
    where = place(wanted, hosts, {}, on_gpu)
    assert set(where) == {name for name, _ in wanted}
    assert where == place(wanted, hosts, {}, on_gpu), "the same call_actor every time"
    crowd = {host.id: list(where.values()).count(host.id) for host in hosts}
    if on_gpu and len(wanted) <= sum(gpus):
        assert all(crowd[host.id] <= host.gpus for host in hosts)


def test_gpus_are_taken_in_turn_and_then_shared() -> None:
    used: list[int] = []
    for _ in range(5):
        index = least_used_gpu(2, used)
        assert index is not None
        used.append(index)
    assert used == [0, 1, 0, 1, 0]
    assert least_used_gpu(3, [0, 2]) == 1
    assert least_used_gpu(0, []) is None


@given(st.integers(1, 20), st.integers(1, 8))
def test_no_gpu_has_more_workers_than_its_shares(workers: int, gpus: int) -> None:
    taken: list[int] = []
    for _ in range(workers):
        index = least_used_gpu(gpus, taken)
        assert index is not None
        taken.append(index)
    assert max(taken.count(index) for index in range(gpus)) == gpu_workers(workers, gpus)


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
        (3, 2, EngineConfig(device_index=0)),  # all on the configured GPU
        (3, 2, EngineConfig(device="cpu")),
        (3, 0, EngineConfig(device="cuda")),  # the worker reports that there is none
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
    ],
)
def test_too_few_gpus_are_an_operators_mistake(
    workers: int, gpus: int, engine: EngineConfig, message: str
) -> None:
    with pytest.raises(BatonError, match=message) as caught:
        require_gpus(cluster(workers, engine), gpus)
    assert caught.value.kind is ErrorKind.INVALID
