"""Readiness of a router before its first worker, with workers, and for a while after its last one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.router.lifecycle.readiness import Readiness
from services.router.placement.ready_pairs import LastingPair
from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.http_client import http

PROMPT = [1, 2, 3]


class Situation:
    """A clock, and whether some pair could serve."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pair = False
        self.lasting = LastingPair(lambda: self.pair, 5.0, lambda: self.now)

    def ready_at(self, now: float, *, pair: bool) -> bool:
        self.now, self.pair = now, pair
        return self.lasting.ready()


def test_a_router_without_workers_yet_is_not_ready() -> None:
    here = Situation()
    assert not here.ready_at(100.0, pair=False)
    assert not here.ready_at(1e6, pair=False)
    assert here.lasting.ends_in_s is None


def test_it_lasts_from_the_moment_at_which_the_last_pair_went() -> None:
    here = Situation()
    assert here.ready_at(100.0, pair=True)
    assert here.lasting.ends_in_s is None
    assert here.ready_at(200.0, pair=False)
    assert here.lasting.ends_in_s == 5.0
    assert here.ready_at(204.9, pair=False)
    assert not here.ready_at(205.0, pair=False)
    assert here.lasting.ends_in_s is None
    # Nothing but a pair makes it ready again, and the time begins anew with each.
    assert not here.ready_at(206.0, pair=False)
    assert here.ready_at(300.0, pair=True)
    assert here.ready_at(301.0, pair=False)
    assert here.ready_at(302.0, pair=True)
    assert here.ready_at(303.0, pair=False)
    assert here.ready_at(307.9, pair=False)
    assert not here.ready_at(308.0, pair=False)


async def _statuses(here: Site) -> tuple[int, int]:
    """The statuses of /ready and of grpc.health.v1."""
    async with http(here) as client, grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return (await client.get("/ready")).status_code, answer.status


async def _until_statuses(here: Site, ready: int, health: int) -> None:
    async with asyncio.timeout(20):
        while await _statuses(here) != (ready, health):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_requests_of_a_router_whose_last_worker_goes_wait_for_the_next(site: SiteMaker) -> None:
    """The router keeps its place behind a Service: no connection is refused while its only workers are
    replaced."""
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    async with site(queue_timeout_s=2.0) as here:
        decode = here.worker("decode-0").behaviour
        decode.draining = True
        await until(lambda: not here.router.placement.usable())
        assert await _statuses(here) == (200, serving)
        waiting = asyncio.create_task(here.generate(ids_request(PROMPT, 5)))
        await until(lambda: here.router.queue.waiting == 1)
        decode.draining = False
        assert tokens_of(await waiting) == expected(PROMPT, 5)

        decode.draining = True
        await asyncio.wait_for(here.router.readiness.wait(ready=False), 20)
        await _until_statuses(here, 503, not_serving)
        decode.draining = False
        await asyncio.wait_for(here.router.readiness.wait(ready=True), 20)
        await _until_statuses(here, 200, serving)


async def test_those_that_wait_for_its_end_are_woken_though_nothing_else_happens() -> None:
    pairs = [True]
    workers = SimpleNamespace(usable=lambda: bool(pairs), unusable_reason=lambda: "no worker is ready")
    dispatcher = SimpleNamespace(draining=False, leaving=False)
    readiness = Readiness(workers, dispatcher, lambda: True, hold_s=0.05)  # type: ignore[arg-type]
    readiness.update()
    pairs.clear()
    readiness.update()
    assert readiness.ready()
    assert not readiness.serving()
    await asyncio.wait_for(readiness.wait(ready=False), 20)
    assert readiness.reason() == "no worker is ready"
