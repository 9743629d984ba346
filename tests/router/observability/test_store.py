"""The router's journal in Redis, and that no request waits for Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.base.errors import BatonError
from baton.state import JournalRecord, Member, State, new_incarnation
from baton.state.embedded import EmbeddedServer
from baton.v1.admin_pb2 import AdminServiceGetAuditRequest, AdminServiceGetStatusRequest, StoreStatus
from baton.v1.journal_pb2 import AcceptedRequest
from baton.v1.types_pb2 import WorkerRole
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.router.http_client import http
from tests.state.journal_reader import open_ids, read_journal
from tests.state.opened import open_state

NAMESPACE = "ours"
KEY = "5a" * 32
PROMPT = [9, 8, 7]


@pytest.fixture
async def reader(server: EmbeddedServer) -> AsyncIterator[State]:
    """Another router, which has the key."""
    state = await open_state(server.url, namespace=NAMESPACE, journal_key=bytes.fromhex(KEY))
    yield state
    await state.close()


def state_of(server: EmbeddedServer) -> dict[str, Any]:
    return {"redis_url": server.url, "namespace": NAMESPACE, "journal_key": KEY, "embedded": True}


async def store(here: Site) -> StoreStatus:
    status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
    found: StoreStatus = status.store
    return found


async def all_closed(here: Site, reader: State) -> None:
    """Waits until the journal has no open request, and the router reports that too."""

    async def empty() -> bool:
        status = await store(here)
        assert status.journal_dropped == 0
        # The router first: an entry that it has yet to write is not in the store either.
        return not (status.journal_open or status.journal_pending) and not await reader.journal.count_open()

    await until(empty, 3)


async def test_what_another_router_would_read(site: SiteMaker, server: EmbeddedServer, reader: State) -> None:
    async with site(state=state_of(server)) as here:
        here.worker("decode-0").behaviour.step_s = 0.02
        request = ids_request(PROMPT, 40, seed=77, temperature=0.5, stop=["never"], min_tokens=2, n=2)
        seen: dict[int, bytes] = {}
        resumable: dict[int, list[bool]] = {0: [], 1: []}
        records: dict[int, JournalRecord | None] = {}
        async for response in here.stub.Generate(request, timeout=10):
            seen[response.index] = response.request_id
            resumable[response.index].append(response.resumable)
            if (
                len(response.token_ids)
                and not records
                and len(seen) == 2
                and all(map(any, resumable.values()))
            ):
                assert set(await open_ids(reader)) == set(seen.values())
                records = {index: await read_journal(reader.journal, one) for index, one in seen.items()}
                status = await store(here)
                assert (status.journal_open, status.journal_pending) == (2, 0)
        for index, record in records.items():
            assert record is not None
            assert (record.request_id, record.token_ids, record.attempt) == (seen[index], tuple(PROMPT), 1)
            details = AcceptedRequest.FromString(record.details)
            assert (details.choice, details.sampling.seed) == (index, 77 + index)
            assert (details.limits.max_tokens, details.limits.min_tokens, *details.stop) == (40, 2, "never")
        for flags in resumable.values():
            assert flags[-1], "a stream says so once its entry is acknowledged"
            assert flags == sorted(flags)
        await here.quiet()
        await all_closed(here, reader)


async def test_an_entry_ends_with_its_request_however_that_ends(
    site: SiteMaker, server: EmbeddedServer, reader: State
) -> None:
    async with site(state=state_of(server)) as here, http(here) as client:
        await here.generate(ids_request(PROMPT, 5))
        prefill, decode = here.worker("prefill-0").behaviour, here.worker("decode-0").behaviour
        prefill.break_prefills, prefill.break_code = 1, grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError):
            await here.generate(ids_request(PROMPT, 5))
        decode.step_s = 0.05
        with pytest.raises(grpc.aio.AioRpcError):
            await here.generate(ids_request(PROMPT, 200), timeout=0.3)
        call = here.stub.Generate(ids_request(PROMPT, 200))
        await anext(aiter(call))
        call.cancel()
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
        await client.post("/v1/completions", json=body)
        await here.quiet()
        await all_closed(here, reader)


async def test_each_dispatch_is_marked(site: SiteMaker, server: EmbeddedServer, reader: State) -> None:
    async with site(prefill=2, state=state_of(server)) as here:
        for name in ("prefill-0", "prefill-1"):
            here.worker(name).behaviour.break_at = "first"
        here.worker("prefill-0").behaviour.break_prefills = 1
        here.worker("decode-0").behaviour.step_s = 0.02
        marks: set[int] = set()
        for _ in range(3):
            async for response in here.stub.Generate(ids_request(PROMPT, 30), timeout=10):
                record = await read_journal(reader.journal, response.request_id)
                marks.add(record.attempt if record is not None else 0)
        assert here.worker("prefill-0").behaviour.break_prefills == 0
        assert {1, 2} <= marks
        await all_closed(here, reader)


async def test_an_unresponsive_redis_delays_no_request(
    site: SiteMaker, server: EmbeddedServer, reader: State
) -> None:
    async with site(state=state_of(server)) as here, http(here) as client:
        await here.generate(ids_request(PROMPT, 5))
        os.kill(server.pid, signal.SIGSTOP)
        responses = await here.generate(ids_request(PROMPT, 24), timeout=5)
        assert tokens_of(responses) == expected(PROMPT, 24)
        assert not any(response.resumable for response in responses)
        await until(lambda: here.router.store.state is not None and here.router.store.state.unavailable)
        many = await asyncio.gather(*(here.generate(ids_request(PROMPT, 24), timeout=5) for _ in range(20)))
        assert [tokens_of(responses) for responses in many] == [expected(PROMPT, 24)] * 20
        status = await store(here)
        assert status.HasField("unavailable_s")
        assert not status.HasField("journal_open")
        figures = (await client.get("/metrics")).text
        assert f'baton_router_redis_up{{model="{MODEL}"}} 0.0' in figures
        os.kill(server.pid, signal.SIGCONT)
        await until(lambda: here.router.store.state is not None and not here.router.store.state.unavailable)
        await here.quiet()
        await all_closed(here, reader)
        assert f'baton_router_redis_up{{model="{MODEL}"}} 1.0' in (await client.get("/metrics")).text


async def test_a_worker_that_only_the_registry_knows_serves(
    site: SiteMaker, server: EmbeddedServer, reader: State, model_folder: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(prefill=0, decode=0, state=state_of(server)))
        fake = FakeWorker("both-9", WorkerRole.WORKER_ROLE_BOTH, FakeCluster.like(model_folder))
        address = (await stack.enter_async_context(fake.serving())).address
        member = Member(
            name="both-9",
            incarnation=new_incarnation(),
            role="both",
            model=MODEL,
            host=socket.gethostname(),
            addresses={"grpc": address},
        )
        lease = reader.lease(member)
        await asyncio.wait_for(here.router.readiness.wait(ready=True), 5)
        assert tokens_of(await here.generate(ids_request(PROMPT, 9))) == expected(PROMPT, 9)
        assert (await store(here)).registered_workers == 1
        # It withdraws but answers still: so it serves on.
        await lease.withdraw()
        await until(lambda: here.router.store.registered_workers == 0, 10)
        assert tokens_of(await here.generate(ids_request(PROMPT, 9))) == expected(PROMPT, 9)


async def test_without_a_state_store_there_is_no_store_status(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        responses = await here.generate(ids_request(PROMPT, 5))
        assert not any(response.resumable for response in responses)
        status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
        report = await here.admin.GetAudit(AdminServiceGetAuditRequest(), timeout=5)
        assert not status.HasField("store")
        assert not report.HasField("store")
        assert "redis" not in (await client.get("/metrics")).text


async def test_a_wrong_url_is_refused(site: SiteMaker) -> None:
    with pytest.raises(BatonError, match="the URL of Redis"):
        async with site(state={"redis_url": "http://:word@h", "namespace": "n"}):
            pass
