"""Workers on a fake Ray: what it is given, where workers go, what is done when a node is lost, and
what a later supervisor finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.cli.parse import parse
from services.cli.ray.supervise import supervise_config
from services.cluster.on_ray.ray_worker_processes import SILENT_NODE_S, RayWorkerProcesses, digest
from services.cluster.on_ray.rooms import Node, declared
from services.cluster.supervision.report import Failure, Phase
from services.cluster.supervision.supervisor import HostLostError, NoRoomError, UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import EngineConfig, WorkerConfig
from tests.cluster.on_ray.fake_ray import FakeRay, fake_ray

SECRETS = {name: f"{name}-that-nobody-else-may-know" for name in ("cluster", "prefix")}
# Ids of nodes.
A, B = "a" * 56, "b" * 56
REDIS_URL = "redis://:password-of-redis@redis:6379/0"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., ClusterConfig]:
    for name, secret in SECRETS.items():
        (tmp_path / name).write_text(secret + "\n")
    (tmp_path / "redis-url").write_text(REDIS_URL)

    def of(engine: str = "{device: cuda}", **counts: int) -> ClusterConfig:
        ports = (
            "{port: 50060}, worker_metrics_port: 9400, transfer: {transfer_port: 50100, frames_port: 50140}"
        )
        (tmp_path / "supervise.yaml").write_text(
            "{model: /models/m, served_model_name: m, supervision: {ray_address: 'head:6379'}, "
            f"cluster_secret_file: {tmp_path}/cluster, prefix_secret_file: {tmp_path}/prefix, "
            f"state: {{namespace: demo, redis_url_file: {tmp_path}/redis-url}}, engine: {engine}, "
            f"worker: {ports}, prefill: {counts.get('prefill', 1)}, decode: {counts.get('decode', 2)}}}"
        )
        arguments = parse(["ray", "supervise", "--config", str(tmp_path / "supervise.yaml")])
        return supervise_config(arguments, {"BATON_HOST": "10.0.0.9"})

    return of


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return fake_ray(monkeypatch, Node(A, {"GPU": 3.0, "baton-prefill": 1.0, "baton-decode": 2.0}))


async def start(processes: RayWorkerProcesses, config: ClusterConfig) -> None:
    await asyncio.gather(*(processes.start(worker, 1) for worker in config.workers))


async def test_ray_is_given_paths_of_secrets_and_no_secret(
    fake: FakeRay, config: Callable[..., ClusterConfig], tmp_path: Path
) -> None:
    cluster = config()
    processes = RayWorkerProcesses(cluster, "ns")
    await start(processes, cluster)
    await processes.stop("decode-0", 1)
    given = repr(fake.given)
    assert str(tmp_path / "cluster") in given
    assert str(tmp_path / "redis-url") in given
    for secret in (*SECRETS.values(), REDIS_URL, "password-of-redis"):
        assert secret not in given


async def test_workers_of_a_node_have_ports_and_gpus_of_their_own(
    fake: FakeRay, config: Callable[..., ClusterConfig]
) -> None:
    cluster = config()
    await start(RayWorkerProcesses(cluster, "ns"), cluster)
    workers = [actor.worker for actor in fake.actors.values()]
    assert sorted(worker["engine"]["device_indexes"] for worker in workers) == [[0], [1], [2]]
    assert sorted(worker["port"] for worker in workers) == [50060, 50061, 50062]
    assert sorted(worker["metrics_port"] for worker in workers) == [9400, 9401, 9402]
    assert sorted(worker["transfer"]["transfer_port"] for worker in workers) == [50100, 50101, 50102]
    assert {worker["engine"]["gpu_workers"] for worker in workers} == {1}


async def test_a_worker_waits_for_room_and_goes_where_it_is(
    fake: FakeRay, config: Callable[..., ClusterConfig]
) -> None:
    cluster = config(decode=3)
    processes = RayWorkerProcesses(cluster, "ns")
    *first, last = cluster.workers
    for worker in first:
        await processes.start(worker, 1)
    with pytest.raises(NoRoomError, match="decode"):
        await processes.start(last, 1)
    assert len(fake.actors) == 3
    fake.nodes.append(Node(B, {"GPU": 1.0}))
    await processes.start(last, 1)
    moved = fake.actors["worker-decode-2"]
    assert (moved.current.node, moved.worker["port"]) == (B, 50060)


async def test_a_worker_leaves_a_node_that_stops(fake: FakeRay, config: Callable[..., ClusterConfig]) -> None:
    cluster = config(decode=1)
    processes = RayWorkerProcesses(cluster, "ns")
    await start(processes, cluster)
    fake.nodes.append(Node(B, {"GPU": 2.0}))
    leaving = fake.actors["worker-decode-0"]
    leaving.current = leaving.current.model_copy(update={"stopping": True})
    report = await processes.report("decode-0")
    assert report is not None, "while it drains it stays"
    assert report.phase is Phase.SERVING
    leaving.current = leaving.current.model_copy(
        update={"phase": Phase.ENDED, "failure": Failure(kind="UNAVAILABLE", message="ended")}
    )
    assert await processes.report("decode-0") is None
    await processes.start(cluster.workers[1], 2)
    assert fake.actors["worker-decode-0"].current.node == B


async def test_a_later_supervisor_adopts_what_is_the_same_and_replaces_the_rest(
    fake: FakeRay, config: Callable[..., ClusterConfig]
) -> None:
    first = config(engine="{device: cuda}", decode=2)
    await start(RayWorkerProcesses(first, "ns"), first)
    again = RayWorkerProcesses(first, "ns")
    await again.replace_outdated()
    assert set(fake.actors) == {"worker-prefill-0", "worker-decode-0", "worker-decode-1"}
    before = list(fake.actors.values())
    fewer = config(engine="{device: cuda}", decode=1)
    # A supervisor of fewer workers: the others' configuration is the same but for links.
    fewer = fewer.model_copy(update={"workers": first.workers[:2]})
    await RayWorkerProcesses(fewer, "ns").replace_outdated()
    assert set(fake.actors) == {"worker-prefill-0", "worker-decode-0"}
    changed = config(engine="{device: cuda, slots: 7}", decode=1)
    await RayWorkerProcesses(changed, "ns").replace_outdated()
    assert not fake.actors
    assert [actor.stopped for actor in before] == [[first.drain_s]] * 3, "each was drained"


def of_up(workers: int, engine: EngineConfig | None = None) -> ClusterConfig:
    """The configuration that `baton up` makes for `workers` workers of both roles."""
    config = WorkerConfig(name="w", role="both", model="m", engine=engine or EngineConfig(device="cuda"))
    named = (config.model_copy(update={"name": f"w{index}", "port": 50060}) for index in range(workers))
    return ClusterConfig(ray_address="head:6379", cluster_id="x", workers=tuple(named))


def options(fake: FakeRay) -> list[dict[str, Any]]:
    return [given for given in fake.given if isinstance(given, dict)]


async def test_no_gpu_is_requested_and_only_detached_actors_outlive_the_supervisor(
    fake: FakeRay, config: Callable[..., ClusterConfig]
) -> None:
    for cluster, lifetime in ((config(), "detached"), (of_up(3), None)):
        fake.given.clear()
        fake.nodes[0] = Node(A, {"GPU": 3.0})
        await start(RayWorkerProcesses(cluster, "ns"), cluster)
        assert len(options(fake)) == 3
        for given in options(fake):
            assert given["lifetime"] == lifetime
            assert (given["num_cpus"], given["max_restarts"]) == (0, 0)
            assert "num_gpus" not in given
            assert "resources" not in given


async def test_the_workers_of_baton_up_keep_their_ports_and_their_gpus(fake: FakeRay) -> None:
    cluster = of_up(2)
    fake.nodes = [Node(A, {"GPU": 2.0})]
    processes = RayWorkerProcesses(cluster, "ns", gpus=2)
    await start(processes, cluster)
    for number in (2, 3):
        given = {name: actor.worker for name, actor in fake.actors.items()}
        assert sorted(worker["engine"]["device_indexes"] for worker in given.values()) == [[0], [1]]
        assert {worker["engine"]["gpu_workers"] for worker in given.values()} == {1}
        assert {worker["port"] for worker in given.values()} == {50060}
        for worker in reversed(cluster.workers):
            before = given[f"worker-{worker.name}"]["engine"]["device_indexes"]
            await processes.start(worker, number)
            assert fake.actors[f"worker-{worker.name}"].worker["engine"]["device_indexes"] == before


@pytest.mark.parametrize(
    ("node", "engine", "indexes", "sharing"),
    [
        ({"GPU": 1.0}, EngineConfig(), [[0]], 3),  # a single GPU is shared by all
        ({"GPU": 2.0, **declared({"both": 3})}, EngineConfig(), [[0], [1]], 2),
        ({"GPU": 2.0}, EngineConfig(gpu_workers=2), [[0], [1]], 2),
        ({"GPU": 2.0}, EngineConfig(device_indexes=(1,)), [[1]], 3),
        ({"GPU": 8.0, **declared({"both": 3})}, EngineConfig(device_indexes=(1,)), [[1]], 3),
        ({"GPU": 6.0}, EngineConfig(tensor_parallel=2), [[0, 1], [2, 3], [4, 5]], 1),
        ({"GPU": 3.0, **declared({"both": 3})}, EngineConfig(tensor_parallel=2), [[0, 1], [0, 2], [1, 2]], 2),
        ({"CPU": 1.0}, EngineConfig(), [[]], 3),  # what Ray does not know may be there
        (declared({"both": 3}), EngineConfig(device="cpu"), [[]], 3),
    ],
)
async def test_gpus_of_baton_up_are_shared_as_without_ray(
    fake: FakeRay, node: dict[str, float], engine: EngineConfig, indexes: list[list[int]], sharing: int
) -> None:
    cluster = of_up(3, engine)
    fake.nodes = [Node(A, node)]
    await start(RayWorkerProcesses(cluster, "ns", gpus=fake.nodes[0].gpus), cluster)
    engines = [actor.worker["engine"] for actor in fake.actors.values()]
    assert sorted({tuple(one["device_indexes"]) for one in engines}) == [tuple(one) for one in indexes]
    assert {one["gpu_workers"] for one in engines} == {sharing}


async def test_workers_of_several_gpus_go_where_so_many_are_left(fake: FakeRay) -> None:
    cluster = of_up(3, EngineConfig(tensor_parallel=2))
    fake.nodes = [Node(A, {"GPU": 3.0}), Node(B, {"GPU": 2.0})]
    processes = RayWorkerProcesses(cluster, "ns", gpus=5)
    *first, last = cluster.workers
    for worker in first:
        await processes.start(worker, 1)
    assert {actor.current.node for actor in fake.actors.values()} == {A, B}
    with pytest.raises(NoRoomError):
        await processes.start(last, 1)


async def test_a_worker_goes_elsewhere_when_its_actor_was_silent(fake: FakeRay) -> None:
    cluster = of_up(1, EngineConfig(device="cpu"))
    fake.nodes = [Node(A, {"CPU": 1.0}, "10.0.0.1"), Node(B, {"CPU": 1.0}, "10.0.0.2")]
    processes, (worker,) = RayWorkerProcesses(cluster, "ns"), cluster.workers
    await processes.start(worker, 1)
    fake.silent.add(A)
    with capture_logs() as logs:
        with pytest.raises(UnresponsiveError):
            await processes.report(worker.name)
        for _ in range(2):
            await processes.kill(worker.name, actor=True)
        assert await processes.report(worker.name) is None
        await processes.start(worker, 2)
    assert fake.actors["worker-w0"].current.node == B
    assert [(one["event"], one["node"]) for one in logs] == [("node_silent", "10.0.0.1")]


async def test_a_node_that_is_lost_while_a_worker_is_made_there_is_the_last_choice_then(
    fake: FakeRay,
) -> None:
    cluster = of_up(1, EngineConfig(device="cpu"))
    fake.nodes = [Node(A, {"CPU": 1.0}, "10.0.0.1"), Node(B, {"CPU": 1.0}, "10.0.0.2")]
    processes, (worker,) = RayWorkerProcesses(cluster, "ns"), cluster.workers
    for ended in (fake.silent, fake.dead):
        ended.add(A)
        with pytest.raises(HostLostError, match=r"10\.0\.0\.1"):
            await processes.start(worker, 1)
        assert not fake.actors, "it was not given up"
        processes = RayWorkerProcesses(cluster, "ns")
        ended.clear()
    fake.dead.add(A)
    with pytest.raises(HostLostError):
        await processes.start(worker, 1)
    await processes.start(worker, 1)
    assert fake.actors["worker-w0"].current.node == B


async def test_a_node_that_answers_again_or_lives_on_is_as_good_as_others(fake: FakeRay) -> None:
    cluster, now = of_up(3, EngineConfig(device="cpu")), 100.0
    fake.nodes = [Node(A, {"CPU": 1.0}), Node(B, {"CPU": 1.0})]
    processes = RayWorkerProcesses(cluster, "ns", clock=lambda: now)
    first, second, third = cluster.workers
    for worker in (first, second):
        await processes.start(worker, 1)
    for worker, node in ((first, A), (second, B)):
        assert fake.actors[f"worker-{worker.name}"].current.node == node
    await processes.kill(second.name, actor=True)
    assert await processes.report(second.name) is None
    await processes.start(third, 1)
    assert fake.actors["worker-w2"].current.node == A, "B is silent"
    now += SILENT_NODE_S
    await processes.start(second, 2)
    assert fake.actors["worker-w1"].current.node == B, "by now Ray would know"
    await processes.kill(third.name, actor=True)
    with capture_logs() as logs:
        await processes.report(first.name)
    assert [one["event"] for one in logs] == ["node_answers_again"]


def test_a_supervisor_that_moves_has_the_same_workers(config: Callable[..., ClusterConfig]) -> None:
    cluster = config()
    moved = cluster.model_copy(update={"host": "10.0.0.77", "name": "pod-2", "admin_http_port": 9000})
    changed = cluster.model_copy(update={"drain_s": 1.0})
    worker = cluster.workers[0]
    assert digest(cluster, worker) == digest(moved, worker) != digest(changed, worker)
