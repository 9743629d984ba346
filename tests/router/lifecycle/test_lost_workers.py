"""Decode workers that die, end or start again, and workers that no pair can be made of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1.types_pb2 import WorkerRole
from services.router.workers import liveness
from tests.router.conftest import Site, SiteMaker, until
from tests.router.fake_workers import FakeWorker
from tests.router.lifecycle.served_requests import failure, served


@contextlib.asynccontextmanager
async def dying(here: Site, name: str) -> Any:
    """A further decode worker of the site, which the body may stop."""
    worker = FakeWorker(name, WorkerRole.WORKER_ROLE_DECODE, here.cluster)
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(worker.serving())
    try:
        yield worker, stack
    finally:
        await stack.aclose()


async def test_a_killed_decode_worker_costs_an_attempt(site: SiteMaker) -> None:
    async with site() as here, dying(here, "decode-9") as (worker, stack):
        await _add_worker(here, worker)
        here.worker("decode-0").behaviour.refuse_reserves = 1
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(served(here))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        await asyncio.sleep(0.1)
        here.worker("decode-0").behaviour.refuse_reserves = 0
        await stack.aclose()
        del here.cluster.workers["decode-9"]
        assert await call == 3  # the refused one included
        await here.quiet()


async def test_a_decode_worker_that_reports_its_end_is_lost_at_once(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LIVENESS_TIMEOUT_S", 60.0)
    async with site() as here, dying(here, "decode-9") as (worker, _):
        await _add_worker(here, worker)
        here.worker("decode-0").behaviour.other_router_slots = 8
        await until(lambda: here.router.directory.workers[1].free_slots == 0)
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(served(here))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        here.worker("decode-0").behaviour.other_router_slots = 0
        worker.behaviour.over = True
        assert await call == 2
        assert here.worker("decode-0").decode.reserves[0].first_number > 0
        del here.cluster.workers["decode-9"]
        await here.quiet()


async def test_a_heartbeat_sent_before_a_failed_call_does_not_count(site: SiteMaker) -> None:
    async with site() as here:
        worker = here.router.directory.workers[0]
        described, asked_at = worker.described, time.monotonic()
        worker.unreachable()
        worker.update(described, claimed_before=0, asked_at=asked_at)
        assert not worker.alive
        worker.update(described, claimed_before=0, asked_at=time.monotonic())
        assert worker.alive


async def test_a_restarted_worker_is_another_one(site: SiteMaker) -> None:
    """Same port, other incarnation: its predecessor's sequence is prefilled again."""
    async with site(both=1, decode=0) as here, dying(here, "decode-9") as (worker, stack):
        here.worker("both-0").behaviour.refuse_reserves = 10**6
        await _add_worker(here, worker)
        worker.behaviour.step_s = 0.02
        call = asyncio.create_task(served(here))
        await until(lambda: any(ticket.emitted for ticket in worker.decode.tickets.values()))
        port = int(worker.address.rsplit(":", 1)[1])
        await stack.aclose()
        again = FakeWorker("decode-9", WorkerRole.WORKER_ROLE_DECODE, here.cluster)
        async with again.serving(port):
            assert await call == 2
            assert again.decode.reserves[0].attempt.number == 2
            assert again.decode.reserves[0].first_number > 0
            await here.quiet()


async def _add_worker(here: Site, worker: FakeWorker) -> None:
    here.router.directory.add(worker.address)
    await until(
        lambda: any(
            known.name == worker.identity.name and known.alive for known in here.router.directory.workers
        )
    )


async def test_no_pair_without_equal_fingerprints(site: SiteMaker) -> None:
    async with site(prefill=1, decode=0, queue_timeout_s=0.3, both=1) as here:
        stranger = FakeWorker("decode-9", WorkerRole.WORKER_ROLE_DECODE, here.cluster, fingerprint=b"other")
        async with stranger.serving():
            await _add_worker(here, stranger)
            here.worker("both-0").behaviour.draining = True
            await until(lambda: not here.router.readiness.ready())
            code, message = await failure(here)
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "no pair" in message
            assert not stranger.decode.reserves
