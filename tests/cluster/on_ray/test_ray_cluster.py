"""A cluster on a Ray that it joins, over a fake one: what is refused, and what Ray is given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.cluster.on_ray import ray_calls
from services.cluster.on_ray.ray_cluster import RayCluster
from services.cluster.on_ray.rooms import Node
from services.cluster.supervision.report import Phase
from services.common.config.cluster import ClusterConfig
from services.common.config.state import StateConfig
from services.common.config.worker import WorkerConfig
from tests.cluster.on_ray.fake_ray import FakeRay, fake_ray

SECRETS = {"cluster_secret": "cluster-secret-of-nobody-else", "prefix_secret": "prefix-secret-of-nobody-else"}
REDIS_URL = "redis://:password-of-redis@redis:6379/0"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setattr(ray_calls, "join_ray", lambda **options: None)
    for name in ("RAY_AUTH_MODE", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", raising=False)
    ray = fake_ray(monkeypatch, Node("a" * 56, {"GPU": 2.0}))

    async def in_thread(work: Any, timeout_s: float = 1.0) -> Any:
        return work()

    monkeypatch.setattr(ray_calls, "in_thread", in_thread)
    return ray


def of_up(count: int) -> ClusterConfig:
    state = StateConfig(redis_url=REDIS_URL, namespace="n")
    worker = WorkerConfig(name="w", role="both", model="m", state=state, **SECRETS)
    workers = (worker.model_copy(update={"name": f"w{index}"}) for index in range(count))
    file = Path("/etc/baton/secrets.yaml")
    return ClusterConfig(ray_address="head:6379", cluster_id="x", workers=tuple(workers), secrets_file=file)


async def test_too_few_gpus_are_refused_before_anything_starts(fake: FakeRay) -> None:
    cluster = RayCluster(of_up(3), lambda: None)
    with pytest.raises(BatonError, match="3 workers need a GPU, and there are 2") as caught:
        await cluster.open()
    assert caught.value.kind is ErrorKind.INVALID
    await cluster.stop(0)
    await cluster.close()
    assert not fake.actors


async def test_ray_is_given_the_path_of_the_secrets_and_no_secret(fake: FakeRay) -> None:
    joined: list[str] = []
    cluster = RayCluster(of_up(2), lambda: joined.append("joined"))
    await cluster.open()
    async with asyncio.timeout(5):
        while [report.phase for report in cluster.status().reports.values()] != [Phase.SERVING] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await cluster.stop(1)
    await cluster.close()
    assert joined == ["joined"]
    assert not fake.actors, "they are ended"
    given = repr(fake.given)
    assert "/etc/baton/secrets.yaml" in given
    assert all(name in given for name in SECRETS)
    for secret in (*SECRETS.values(), REDIS_URL, "password-of-redis"):
        assert secret not in given
