"""A Ray whose actors are objects of the test: what it is given, and where its actors are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray as real_ray

from services.cluster.on_ray import ray_worker_processes
from services.cluster.on_ray.ray_calls import ActorGoneError
from services.cluster.on_ray.rooms import Node
from services.cluster.supervision.report import Phase, Report
from services.cluster.supervision.supervisor import UnresponsiveError


class FakeRay:
    """Actors by name, each on the node that it was created for; and all that it was given."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)
        self.actors: dict[str, FakeActor] = {}
        self.given: list[object] = []
        # Ids of nodes whose actors do not answer, and of those that Ray knows to be dead.
        self.silent: set[str] = set()
        self.dead: set[str] = set()

    def remote(self, actor_class: type[object]) -> SimpleNamespace:
        def options(**chosen: Any) -> SimpleNamespace:
            self.given.append(chosen)

            def make(*arguments: str) -> FakeActor:
                self.given.append(arguments)
                node = chosen["scheduling_strategy"].node_id
                actor = FakeActor(self, node, digest=arguments[2])
                return self.actors.setdefault(chosen["name"], actor)

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def kill(self, actor: FakeActor) -> None:
        actor.killed = True
        self.actors = {name: other for name, other in self.actors.items() if other is not actor}


class FakeActor:
    def __init__(self, ray: FakeRay, node: str, digest: str) -> None:
        self.current = Report(phase=Phase.EMPTY, node=node, digest=digest)
        self.stopped: list[float] = []
        self.killed = False
        self._ray = ray
        self.report = self._method(lambda: self.current.model_dump(mode="json"))
        self.start = self._method(self._start)
        self.stop = self._method(self.stopped.append)

    def _start(self, worker_json: str, number: int, place: int) -> None:
        worker = json.loads(worker_json)
        indexes = tuple(worker["engine"]["device_indexes"])
        update = {"phase": Phase.SERVING, "starts": number, "place": place, "device_indexes": indexes}
        self.current = self.current.model_copy(update=update)
        self.worker = worker

    def _method(self, method: Callable[..., Any]) -> SimpleNamespace:
        async def remote(*arguments: Any) -> Any:
            self._ray.given.append(arguments)
            await asyncio.sleep(0)
            if self.killed or self.current.node in self._ray.dead:
                raise ActorGoneError("its node has died")
            if self.current.node in self._ray.silent:
                raise UnresponsiveError("no answer within 2 s")
            return method(*arguments)

        return SimpleNamespace(remote=remote)


def fake_ray(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> FakeRay:
    """Puts a new one in the place of Ray."""
    ray = FakeRay(*nodes)

    async def find(name: str, namespace: str) -> FakeActor | None:
        return ray.actors.get(name)

    async def in_thread(work: Callable[[], Any], timeout_s: float = 1.0) -> Any:
        return work()

    async def call_actor(call: Awaitable[Any], timeout_s: float = 1.0) -> Any:
        return await call

    monkeypatch.setattr(ray_worker_processes, "find_actor", find)
    monkeypatch.setattr(ray_worker_processes, "in_thread", in_thread)
    monkeypatch.setattr(ray_worker_processes, "call_actor", call_actor)
    monkeypatch.setattr(ray_worker_processes, "nodes_of_ray", lambda: ray.nodes)
    monkeypatch.setattr(real_ray, "remote", ray.remote)
    monkeypatch.setattr(real_ray, "kill", ray.kill)
    monkeypatch.setattr(real_ray.util, "list_named_actors", lambda all_namespaces: list(ray.actors))
    return ray
