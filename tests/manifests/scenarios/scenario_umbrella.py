"""Two copies of the chart in one release: each is asked through its own Service, and keeps to its pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton.client import AsyncClient
from tests.deploy.chart import values_of
from tests.deploy.values.umbrella import make_umbrella, render_umbrella
from tests.manifests.cluster import Cluster, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALIASES = ("chat", "code")
_ANSWER_S = 60.0
_EVERY_S = 0.5
# A larger model takes as long to load; a Service drops a pod whose readiness probe has failed for 4 s.
_AWAY_S = 12.0


def _values(alias: str) -> dict[str, Any]:
    """One pod of workers, which ends before its successor starts, as where it holds the GPUs."""
    values = values_of("cpu")
    values["workerGroup"]["maxSurge"] = 0
    return values | {"model": {"servedName": f"{alias}-model"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("umbrella")
    chart = make_umbrella(folder / "chart", ALIASES)
    rendered = render_umbrella(chart, {alias: _values(alias) for alias in ALIASES})
    async with running(rendered, {}, folder / "pods") as made:
        yield made


def _address(cluster: Cluster, alias: str, port: str) -> str:
    proxy = cluster.services[f"up-{alias}"]
    (number,) = (one.port for one in proxy.service.ports if one.name == port)
    return f"{proxy.address}:{number}"


async def _complete(address: str, model: str) -> httpx.Response:
    """Over a connection of its own."""
    asked = {
        "model": model,
        "prompt": "What is Baton?",
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
        return await client.post(f"http://{address}/v1/completions", json=asked)


@pytest.mark.parametrize("alias", ALIASES)
async def test_each_is_asked_through_its_service(cluster: Cluster, alias: str) -> None:
    """Over HTTP and gRPC; the other's model is unknown there."""
    address, model = _address(cluster, alias, "http"), f"{alias}-model"
    async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
        models = (await client.get(f"http://{address}/v1/models")).json()["data"]
    assert [one["id"] for one in models] == [model]
    answer = await _complete(address, model)
    assert answer.json()["usage"]["completion_tokens"] == 8
    (other,) = {*ALIASES} - {alias}
    assert (await _complete(address, f"{other}-model")).status_code == 404
    async with AsyncClient(_address(cluster, alias, "grpc"), model=model) as client:
        completion = await client.complete("What is Baton?", max_tokens=8, temperature=0.0, ignore_eos=True)
    assert completion.text == answer.json()["choices"][0]["text"]
    code, output = await cluster.run_hook(f"up-{alias}-test")
    assert code == 0, output


@pytest.mark.parametrize("alias", ALIASES)
async def test_each_sees_its_own_pods_alone(cluster: Cluster, alias: str) -> None:
    for name, proxy in cluster.services.items():
        if name.startswith(f"up-{alias}"):
            found = {address for port in proxy.service.ports for address, _ in proxy.endpoints(port)}
            own = {
                pod.address
                for deployment, pods in cluster.pods.items()
                if deployment.startswith(f"up-{alias}-")
                for pod in pods
            }
            assert found
            assert found <= own, name
    (router,) = cluster.pods[f"up-{alias}-router"]
    code, output = await router.execute(["baton", "status"], _ANSWER_S)
    assert code == 0, output
    (workers,) = cluster.pods[f"up-{alias}-workers"]
    (other,) = {*ALIASES} - {alias}
    assert workers.name in output
    assert f"up-{other}" not in output


async def test_no_call_fails_while_the_only_pod_of_workers_is_replaced(cluster: Cluster) -> None:
    """Each call has a connection of its own: the Service has an endpoint all the time, and calls wait for the
    next pod (`queue_timeout_s`)."""
    address, model = _address(cluster, "chat", "http"), "chat-model"
    calls: list[asyncio.Task[httpx.Response]] = []

    async def ask_on() -> None:
        while True:
            calls.append(asyncio.create_task(_complete(address, model)))
            await asyncio.sleep(_EVERY_S)

    asking = asyncio.create_task(ask_on())
    (ended,) = await cluster.replace("up-chat-workers", _AWAY_S)
    asking.cancel()
    assert ended.code == 0
    assert len(calls) > _AWAY_S / _EVERY_S / 2
    assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    print(f"\nPROOF calls while the only pod of workers was replaced: {len(calls)}, failed: 0")
