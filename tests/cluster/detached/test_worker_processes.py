"""Detached workers on a fake Ray: what it is given, where workers go, and what a later supervisor finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray as real_ray

from services.cli.main import _parser
from services.cli.supervise import supervise_config
from services.cluster import ray_worker_processes
from services.cluster.detached import worker_processes
from services.cluster.detached.rooms import Node
from services.cluster.detached.worker_processes import DetachedWorkerProcesses
from services.cluster.report import Failure, Phase, Report
from services.cluster.supervision import NoRoomError
from services.common.config.cluster import ClusterConfig

SECRETS = {name: f"{name}-that-nobody-else-may-know" for name in ("cluster", "prefix")}
REDIS_URL = "redis://:password-of-redis@redis:6379/0"


class FakeRay:
    """Actors by name, each on the node that it was created for; and all that it was given."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)
        self.actors: dict[str, FakeActor] = {}
        self.given: list[object] = []
        self.error: type[Exception] = RuntimeError

    def remote(self, actor_class: type[object]) -> SimpleNamespace:
        def options(**chosen: Any) -> SimpleNamespace:
            self.given.append(chosen)

            def make(*arguments: str) -> FakeActor:
                self.given.append(arguments)
                node = chosen["scheduling_strategy"].node_id
                actor = FakeActor(self, node, digest=arguments[4])
                return self.actors.setdefault(chosen["name"], actor)

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def kill(self, actor: FakeActor) -> None:
        self.actors = {name: other for name, other in self.actors.items() if other is not actor}


class FakeActor:
    def __init__(self, ray: FakeRay, node: str, digest: str) -> None:
        self.current = Report(phase=Phase.EMPTY, node=node, digest=digest)
        self.stopped: list[float] = []
        self._ray = ray
        self.report = self._method(lambda: self.current.model_dump(mode="json"))
        self.start_at = self._method(self._start)
        self.stop = self._method(self.stopped.append)

    def _start(self, worker_json: str, number: int, place: int) -> None:
        worker = json.loads(worker_json)
        index = worker["engine"]["device_index"]
        update = {"phase": Phase.SERVING, "starts": number, "place": place, "device_index": index}
        self.current = self.current.model_copy(update=update)
        self.worker = worker

    def _method(self, method: Callable[..., Any]) -> SimpleNamespace:
        async def remote(*arguments: Any) -> Any:
            self._ray.given.append(arguments)
            await asyncio.sleep(0)
            return method(*arguments)

        return SimpleNamespace(remote=remote)


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
        arguments = _parser().parse_args(["supervise", "--config", str(tmp_path / "supervise.yaml")])
        return supervise_config(arguments, {"BATON_HOST": "10.0.0.9"})

    return of


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay(Node("a" * 56, {"GPU": 3.0, "baton-prefill": 1.0, "baton-decode": 2.0}))

    async def find(name: str, namespace: str) -> FakeActor | None:
        return ray.actors.get(name)

    async def in_thread(work: Callable[[], Any], timeout_s: float = 1.0) -> Any:
        return work()

    for module in (ray_worker_processes, worker_processes):
        monkeypatch.setattr(module, "find_actor", find)
        monkeypatch.setattr(module, "in_thread", in_thread)
    monkeypatch.setattr(worker_processes, "nodes_of_ray", lambda: ray.nodes)
    monkeypatch.setattr(real_ray, "remote", ray.remote)
    monkeypatch.setattr(real_ray, "kill", ray.kill)
    monkeypatch.setattr(real_ray.util, "list_named_actors", lambda all_namespaces: list(ray.actors))
    return ray


async def start(processes: DetachedWorkerProcesses, config: ClusterConfig) -> None:
    await asyncio.gather(*(processes.start(worker, 1) for worker in config.workers))


async def test_ray_is_given_paths_of_secrets_and_no_secret(
    fake: FakeRay, config: Callable[..., ClusterConfig], tmp_path: Path
) -> None:
    cluster = config()
    processes = DetachedWorkerProcesses(cluster, "ns")
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
    await start(DetachedWorkerProcesses(cluster, "ns"), cluster)
    workers = [actor.worker for actor in fake.actors.values()]
    assert sorted(worker["engine"]["device_index"] for worker in workers) == [0, 1, 2]
    assert sorted(worker["port"] for worker in workers) == [50060, 50061, 50062]
    assert sorted(worker["metrics_port"] for worker in workers) == [9400, 9401, 9402]
    assert sorted(worker["transfer"]["transfer_port"] for worker in workers) == [50100, 50101, 50102]
    assert {worker["engine"]["gpu_workers"] for worker in workers} == {1}


async def test_a_worker_waits_for_room_and_goes_where_it_is(
    fake: FakeRay, config: Callable[..., ClusterConfig]
) -> None:
    cluster = config(decode=3)
    processes = DetachedWorkerProcesses(cluster, "ns")
    *first, last = cluster.workers
    for worker in first:
        await processes.start(worker, 1)
    with pytest.raises(NoRoomError, match="decode"):
        await processes.start(last, 1)
    assert len(fake.actors) == 3
    fake.nodes.append(Node("b" * 56, {"GPU": 1.0}))
    await processes.start(last, 1)
    moved = fake.actors["worker-decode-2"]
    assert (moved.current.node, moved.worker["port"]) == ("b" * 56, 50060)


async def test_a_worker_leaves_a_node_that_stops(fake: FakeRay, config: Callable[..., ClusterConfig]) -> None:
    cluster = config(decode=1)
    processes = DetachedWorkerProcesses(cluster, "ns")
    await start(processes, cluster)
    fake.nodes.append(Node("b" * 56, {"GPU": 2.0}))
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
    assert fake.actors["worker-decode-0"].current.node == "b" * 56


async def test_a_later_supervisor_adopts_what_is_the_same_and_replaces_the_rest(
    fake: FakeRay, config: Callable[..., ClusterConfig]
) -> None:
    first = config(engine="{device: cuda}", decode=2)
    await start(DetachedWorkerProcesses(first, "ns"), first)
    again = DetachedWorkerProcesses(first, "ns")
    await again.replace_outdated()
    assert set(fake.actors) == {"worker-prefill-0", "worker-decode-0", "worker-decode-1"}
    before = list(fake.actors.values())
    fewer = config(engine="{device: cuda}", decode=1)
    # A supervisor of fewer workers: the others' configuration is the same but for links.
    fewer = fewer.model_copy(update={"workers": first.workers[:2]})
    await DetachedWorkerProcesses(fewer, "ns").replace_outdated()
    assert set(fake.actors) == {"worker-prefill-0", "worker-decode-0"}
    changed = config(engine="{device: cuda, slots: 7}", decode=1)
    await DetachedWorkerProcesses(changed, "ns").replace_outdated()
    assert not fake.actors
    assert [actor.stopped for actor in before] == [[first.drain_s]] * 3, "each was drained"
