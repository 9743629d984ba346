"""Two clusters in one Redis namespace: routers share workers that know their secret, and none is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from baton.v1.admin_pb2 import WorkerState
from tests.e2e.support.cluster import CLUSTER_SECRET, Answer, Cluster, assert_all_free, baton_up
from tests.e2e.support.redis_server import redis_server

FLAGS = ("--prefill", "1", "--decode", "1", "--redis-namespace", "shared", "--dtype", "float64")
FOUND_S = 10.0


@asynccontextmanager
async def two_clusters(
    model: Path, workers: int, secret: str = CLUSTER_SECRET
) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Two clusters in one namespace, once each router sees `workers` of them. `secret`: the second
    cluster's."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        config = f"state: {{redis_url: '{redis.url}'}}"
        first = stack.enter_context(baton_up(model, *FLAGS, config=config))
        second = stack.enter_context(baton_up(model, *FLAGS, config=config, secret=secret))
        for cluster in (first, second):
            await until_ready(cluster, workers)
        yield first, second


async def until_ready(cluster: Cluster, workers: int) -> None:
    async with asyncio.timeout(FOUND_S):
        while True:
            status = await cluster.status()
            ready = [one for one in status.workers if one.state == WorkerState.WORKER_STATE_READY]
            if len(ready) == workers:
                return
            await asyncio.sleep(0.05)


async def ask(clusters: tuple[Cluster, Cluster], requests: int, at_once: int) -> list[Answer | Exception]:
    """Sends requests to both routers in turn."""
    turn = asyncio.Semaphore(at_once)
    async with clusters[0].stub() as first, clusters[1].stub() as second:
        apis = ((clusters[0], first), (clusters[1], second))

        async def one(number: int) -> Answer:
            cluster, stub = apis[number % 2]
            prompt = [1 + (number * 7 + place) % 60 for place in range(20 + number % 30)]
            async with turn:
                return await cluster.generate(stub, prompt, max_tokens=8, temperature=0, ignore_eos=True)

        answers = await asyncio.gather(*(one(number) for number in range(requests)), return_exceptions=True)
        for cluster in clusters:
            await assert_all_free(cluster, 5.0)
    return [answer for answer in answers if isinstance(answer, Answer | Exception)]


def judge(answers: list[Answer | Exception]) -> None:
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    tried = [answer.last.trace.attempts for answer in answers if isinstance(answer, Answer) and answer.last]
    again = [attempts for attempts in tried if attempts > 1]
    assert (len(failed), len(again)) == (0, 0), f"of {len(answers)}: {failed[:1]}"


@pytest.mark.slow
async def test_with_one_secret_they_share_their_workers(model: Path) -> None:
    """Each of the four links is between two workers of which others have the same names."""
    async with two_clusters(model, 4) as clusters:
        answers = await ask(clusters, 48, 8)
        lines = [line for cluster in clusters for line in cluster.log.read_text().splitlines()]
        assert [line for line in lines if "attempt_failed" in line or "newer link" in line] == []
        judge(answers)


@pytest.mark.slow
async def test_with_a_secret_each_they_leave_each_other_alone(model: Path) -> None:
    async with two_clusters(model, 2, "the secret of the second one") as clusters:
        judge(await ask(clusters, 120, 8))
        await asyncio.sleep(2)
        for cluster in clusters:
            await until_ready(cluster, 2)
