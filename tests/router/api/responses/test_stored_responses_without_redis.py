"""Stored responses while Redis does not answer, and what is written late."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from baton.state.embedded import EmbeddedServer
from services.common.config.router import ResponseStorage
from services.router.conversations import stored_responses
from services.router.conversations.record import StoredResponse
from services.router.conversations.stored_responses import StoredResponses
from tests.router.api.responses.storing_routers import client_of, create, responses_of, storing
from tests.router.conftest import MODEL, SiteMaker, until
from tests.router.http_client import http
from tests.state.memory_responses import MemoryResponses


async def test_redis_away(
    site: SiteMaker,
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Responses are answered; what waits is found here; what needs Redis is 503 with Retry-After."""
    async with site(**storing(server)) as here, client_of(here) as client, http(here) as plain:
        stored = await create(client, "one")
        await until(lambda: responses_of(here).pending == 0)
        monkeypatch.setattr(stored_responses, "WRITE_S", 0.5)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            lost = await create(client, "two")
            assert (await client.responses.retrieve(lost.id)).output_text == lost.output_text
            body = {"model": MODEL, "input": "a", "previous_response_id": stored.id}
            answers = await asyncio.gather(
                plain.post("/v1/responses", json=body),
                plain.get(f"/v1/responses/{stored.id}"),
                plain.delete(f"/v1/responses/{stored.id}"),
            )
            for answer in answers:
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert "127.0.0.1" not in answer.text
            await until(lambda: responses_of(here).pending == 0, 20)
            assert responses_of(here).written["failed"] == 1
            lines = capsys.readouterr().out.splitlines()
            (line,) = [line for line in lines if "response_not_stored" in line]
            assert "Redis" in line
        finally:
            os.kill(server.pid, signal.SIGCONT)
        metrics = (await plain.get("/metrics")).text
        assert 'baton_router_stored_responses_total{model="fake",result="failed"} 1.0' in metrics
        assert 'baton_router_stored_response_reads_total{model="fake",result="failed"}' in metrics


async def test_a_short_outage_loses_nothing(site: SiteMaker, server: EmbeddedServer) -> None:
    async with site(**storing(server)) as here, client_of(here) as client:
        server.kill()
        await server.wait()
        first = await create(client, "one")
        back = await EmbeddedServer.start(port=server.port, password=server.password)
        try:
            await until(lambda: responses_of(here).pending == 0, 20)
            assert responses_of(here).written["stored"] == 1
            assert (await client.responses.retrieve(first.id)).output_text == first.output_text
        finally:
            await back.stop()


async def test_a_response_that_another_router_still_writes_is_found() -> None:
    store = MemoryResponses(time.monotonic)
    reader = StoredResponses(store, ResponseStorage(ttl_s=60), 1 << 20, settle_s=3.0)
    record, response_id = StoredResponse(b'{"output": []}', b"[]"), f"resp_{'1' * 32}"
    found = asyncio.create_task(reader.get(response_id))
    await asyncio.sleep(0)  # it has looked, and found nothing
    await asyncio.sleep(0.01)
    await store.put("", response_id, record.packed(), 60, 1 << 20)
    assert await found == record
    assert reader.reads == {"found": 1, "missing": 0, "failed": 0}


async def test_writes_that_wait_are_bounded() -> None:
    """Further ones are dropped and counted, and nothing is kept of them."""
    store = MemoryResponses(time.monotonic)
    store.unavailable = True
    responses = StoredResponses(store, ResponseStorage(ttl_s=60), 1 << 20)
    record = StoredResponse(b"x" * 1_000_000, b"[]")
    for number in range(100):
        responses.keep(f"resp_{number:032}", record)
    assert responses.pending == stored_responses.MAX_PENDING_BYTES // len(record)
    assert responses.written["dropped"] == 100 - responses.pending
    store.unavailable = False
    await until(lambda: responses.pending == 0, 20)
    assert responses.pending_bytes == 0
    assert responses.written["stored"] == stored_responses.MAX_PENDING_BYTES // len(record)
