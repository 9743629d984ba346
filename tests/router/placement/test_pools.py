"""Workers of several pools under one served name: a request stays in one, and an operator chooses which."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog.testing

from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, PoolStatus, SwitchPoolRequest, WorkerState
from baton.v1.types_pb2 import WorkerRole
from services.cli.main import main
from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.fake_workers import FakeWorker
from tests.router.http_client import complete, http

PROMPT = [9, 8, 7]
ROLES = {"prefill": WorkerRole.WORKER_ROLE_PREFILL, "decode": WorkerRole.WORKER_ROLE_DECODE}
OTHER = WorkerState.WORKER_STATE_OTHER_POOL
READY = WorkerState.WORKER_STATE_READY


@contextlib.asynccontextmanager
async def joined(here: Site, name: str, **pool: Any) -> AsyncIterator[FakeWorker]:
    """One more worker, with these parts of its pool different."""
    worker = FakeWorker(name, ROLES[name.split("-")[0]], here.cluster)
    for field, value in pool.items():
        setattr(worker.pool, field, value)
    async with worker.serving():
        here.router.directory.add(worker.address)
        await until(lambda: name in {one.name for one in here.router.directory.workers if one.alive})
        yield worker


@contextlib.asynccontextmanager
async def upgraded(here: Site) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    """A pair of workers of another checkpoint."""
    async with (
        joined(here, "prefill-9", checkpoint=b"new") as prefill,
        joined(here, "decode-9", checkpoint=b"new") as decode,
    ):
        yield prefill, decode


async def states(here: Site) -> dict[str, WorkerState.ValueType]:
    status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
    return {worker.worker.identity.name: worker.state for worker in status.workers}


async def pools(here: Site) -> dict[bytes, PoolStatus]:
    """The pools of the status, by checkpoint."""
    status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
    return {pool.pool.checkpoint: pool for pool in status.pools}


async def switch(here: Site, checkpoint: bytes) -> None:
    pool = (await pools(here))[checkpoint].id
    await here.admin.SwitchPool(SwitchPoolRequest(pool=pool), timeout=5)


async def served(here: Site, count: int = 6) -> None:
    assert tokens_of(await here.generate(ids_request(PROMPT, count))) == expected(PROMPT, count)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "another name"),
        ("checkpoint", b"new"),
        ("tokenizer", b"another"),
        ("kv_format", "float32/16/fp8"),
        ("numerics", "fast"),
    ],
)
async def test_workers_of_another_pool_get_no_work(site: SiteMaker, field: str, value: Any) -> None:
    async with (
        site(slots=2) as here,
        joined(here, "prefill-9", **{field: value}) as prefill,
        joined(here, "decode-9", **{field: value}) as decode,
    ):
        await asyncio.gather(*(served(here) for _ in range(12)))
        assert not prefill.prefill.requests
        assert not decode.decode.reserves
        assert await states(here) == {
            "prefill-0": READY, "decode-0": READY, "prefill-9": OTHER, "decode-9": OTHER,
        }  # fmt: skip
        assert (
            len({pool.id for pool in (await here.admin.GetStatus(AdminServiceGetStatusRequest())).pools}) == 2
        )
        await here.quiet()


async def test_a_request_fails_rather_than_continue_in_another_pool(site: SiteMaker) -> None:
    """A decode worker ends in the middle. Another pool is ready, and new requests fail too."""
    async with site(queue_timeout_s=0.5) as here, upgraded(here) as (prefill, decode):
        here.worker("decode-0").behaviour.step_s = 0.02
        asked = asyncio.create_task(here.generate(ids_request(PROMPT, 40)))
        await until(lambda: any(ticket.emitted for ticket in here.worker("decode-0").decode.tickets.values()))
        here.worker("decode-0").behaviour.over = True
        for request in (asked, here.generate(ids_request(PROMPT, 4))):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await request
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not prefill.prefill.requests
        assert not decode.decode.reserves


async def test_a_router_serves_the_pool_that_it_is_configured_for(site: SiteMaker) -> None:
    async with site() as other, upgraded(other):
        wanted = (await pools(other))[b"new"].id
    async with site(pool=wanted) as here:
        await until(lambda: len(here.router.directory.workers) == 2)
        assert not here.router.placement.usable()
        assert set((await states(here)).values()) == {OTHER}
        async with upgraded(here) as (prefill, _):
            await served(here)
            assert len(prefill.prefill.requests) == 1
            assert not here.worker("prefill-0").prefill.requests


async def test_a_switch_sends_new_requests_elsewhere_and_running_ones_end_in_theirs(site: SiteMaker) -> None:
    async with site(decode=2) as here, upgraded(here) as (prefill, decode):
        old = [here.worker(name) for name in ("decode-0", "decode-1")]
        for worker in old:
            worker.behaviour.step_s = 0.02
        running = asyncio.create_task(here.generate(ids_request(PROMPT, 24)))
        await until(
            lambda: any(ticket.emitted for worker in old for ticket in worker.decode.tickets.values())
        )
        await switch(here, b"new")
        found = await pools(here)
        assert (found[b"c"].current, found[b"new"].current) == (False, True)
        assert (found[b"c"].running, found[b"c"].workers) == (1, 3)
        assert (await states(here))["decode-0"] == OTHER
        await served(here)
        assert len(decode.decode.reserves) == 1
        (busy,) = (worker for worker in old if worker.decode.used_slots)
        busy.behaviour.over = True  # its request continues in the pool where it began
        answer = await running
        assert tokens_of(answer) == expected(PROMPT, 24)
        assert answer[-1].trace.attempts == 2
        assert len(prefill.prefill.requests) == len(decode.decode.reserves) == 1


async def test_a_switch_is_refused_with_a_reason(site: SiteMaker) -> None:
    async with (
        site() as here,
        joined(here, "decode-9", checkpoint=b"new"),
        joined(here, "decode-8", tokenizer=b"another"),
    ):
        found = (await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)).pools
        alone = next(pool.id for pool in found if pool.pool.checkpoint == b"new")
        other = next(pool for pool in found if pool.pool.tokenizer == b"another")
        assert not other.compatible
        for pool, code in (
            ("0" * 12, grpc.StatusCode.NOT_FOUND),
            (other.id, grpc.StatusCode.FAILED_PRECONDITION),
            (alone, grpc.StatusCode.FAILED_PRECONDITION),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await here.admin.SwitchPool(SwitchPoolRequest(pool=pool), timeout=5)
            assert failed.value.code() is code
        await served(here)


async def test_all_choices_of_one_call_are_of_one_pool(site: SiteMaker) -> None:
    """One slot: the switch comes while most of them wait."""
    async with site(slots=1) as here, upgraded(here) as (_, decode), http(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.005
        answer = asyncio.create_task(complete(client, n=4, prompt=[PROMPT, PROMPT], max_tokens=10))
        await until(lambda: here.router.queue.waiting == 7)
        await switch(here, b"new")
        await served(here)  # one that is bound to another pool does not hold it up
        assert here.router.queue.waiting > 0
        assert (await answer).status_code == 200
        assert len(decode.decode.reserves) == 1


async def test_each_role_has_one_weight_format(site: SiteMaker) -> None:
    """Roles may differ; a second format of a role is used once there is no worker with the first."""
    async with site(prefill=1, decode=1, slots=1) as here:
        other = FakeWorker("decode-9", WorkerRole.WORKER_ROLE_DECODE, here.cluster)
        other.weight_format = "fp8"
        async with other.serving():
            here.router.directory.add(other.address)
            await until(lambda: len([one for one in here.router.directory.workers if one.alive]) == 3)
            await asyncio.gather(*(served(here) for _ in range(4)))
            assert not other.decode.reserves
            assert (await states(here))["decode-9"] == OTHER
            here.worker("decode-0").behaviour.step_s = 0.02
            running = asyncio.create_task(here.generate(ids_request(PROMPT, 40)))
            await until(lambda: here.worker("decode-0").decode.used_slots == 1)
            here.worker("decode-0").behaviour.draining = True
            await until(lambda: here.router.directory.at(other.address).serves)  # type: ignore[union-attr]
            await served(here)
            assert len(other.decode.reserves) == 1
            here.worker("decode-0").behaviour.draining = False
            assert tokens_of(await running) == expected(PROMPT, 40)


async def test_the_command_lists_and_switches(
    site: SiteMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no cell of the table is cut
    with structlog.testing.capture_logs():  # they would be among what the command prints
        await switched_by_command(site, capsys)


async def switched_by_command(site: SiteMaker, capsys: pytest.CaptureFixture[str]) -> None:
    async with site() as here, upgraded(here) as (_, decode):

        async def baton(*arguments: str) -> tuple[int, list[str]]:
            code = await asyncio.to_thread(main, ["pool", *arguments, "--admin", here.addresses["admin"]])
            shown = capsys.readouterr()
            return code, (shown.out + shown.err).splitlines()

        found = await pools(here)
        code, lines = await baton("list")
        assert code == 0
        rows = {pool.id: line for pool in found.values() for line in lines if pool.id in line}
        assert found[b"c"].id in rows, lines
        assert " current " in rows[found[b"c"].id]
        assert " ready " in rows[found[b"new"].id]
        code, lines = await baton("switch", found[b"new"].id)
        assert code == 0
        assert any(f"{found[b'new'].id}  current " in line for line in lines), lines
        await served(here)
        assert len(decode.decode.reserves) == 1
        code, lines = await baton("switch", "0" * 12)
        assert (code, lines) == (2, [f"baton: error: no worker belongs to a pool '{'0' * 12}'"])
