"""Stored responses with OpenAI's client: continued, read, listed and deleted, by their tenant alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from baton.base.errors import BatonError, FieldError
from baton.state.embedded import EmbeddedServer
from services.common.config.router import ResponseStorage, RouterConfig
from services.router.conversations import stored_responses
from services.router.conversations.record import StoredResponse, id_of, json_of, stored_document
from services.router.conversations.stored_responses import StoredResponses
from services.router.formats.json_bodies import encode, encode_lines
from services.router.formats.responses.body import ResponsesBody
from services.router.formats.responses.conversation import stored_items
from services.router.observability.store import Store
from services.router.tokenization.helper_processes import HelperProcesses
from tests.router.api.test_openapi import check
from tests.router.auth.test_tenants import auth
from tests.router.conftest import MODEL, Site, SiteMaker, until
from tests.router.http_client import http
from tests.router.observability.test_audit import events as audit_events
from tests.router.tenants.test_tenants_file import tenant
from tests.state.memory_responses import MemoryResponses

KEY = "5a" * 32


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    started = await EmbeddedServer.start()
    yield started
    await started.stop()


def storing(server: EmbeddedServer, **limits: Any) -> dict[str, Any]:
    """Settings of a router that stores responses there."""
    state = {"redis_url": server.url, "namespace": "ours", "journal_key": KEY, "embedded": True}
    return {"state": state, "stored_responses": {"ttl_s": 60, **limits}}


@asynccontextmanager
async def client_of(here: Site, key: str = "unused") -> AsyncIterator[Any]:
    base = f"http://{here.addresses['http']}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
        yield client


async def create(client: Any, text: Any, **fields: Any) -> Any:
    asked = {"model": MODEL, "input": text, "temperature": 0, "max_output_tokens": 4, **fields}
    return await client.responses.create(**asked)


def prompt_of(here: Site) -> str:
    return bytes(here.worker("prefill-0").prefill.prompts[-1]).decode()


async def test_a_conversation_goes_on_by_its_id(site: SiteMaker, server: EmbeddedServer) -> None:
    """Whole and streamed, with a text and with items; from each of its turns, and at another router."""
    async with site(**storing(server)) as here, client_of(here) as client:
        first: Response = await create(client, "one", instructions="Be brief.")
        assert first.model_dump()["store"] is True
        events = [
            event async for event in await create(client, "two", previous_response_id=first.id, stream=True)
        ]
        second = events[-1].response
        # Instructions are those of one request.
        assert prompt_of(here) == f"<user>one\n<assistant>{first.output_text}\n<user>two\n<assistant>"
        assert (second.previous_response_id, events[0].response.store) == (first.id, True)
        items = [{"role": "user", "content": [{"type": "input_text", "text": "three"}]}]
        third = await create(client, items, previous_response_id=second.id)
        whole = (
            f"<user>one\n<assistant>{first.output_text}\n<user>two\n<assistant>{second.output_text}\n"
            "<user>three\n<assistant>"
        )
        assert prompt_of(here) == whole
        assert (await client.responses.retrieve(third.id)) == third
        await until(lambda: responses_of(here).pending == 0)
        await here.quiet()
    async with site(**storing(server)) as here, client_of(here) as client:
        again = await create(client, "three", previous_response_id=second.id)
        assert prompt_of(here) == whole
        assert again.output_text == third.output_text
        assert again.usage == third.usage
        other = await create(client, "2", previous_response_id=first.id)
        assert prompt_of(here) == f"<user>one\n<assistant>{first.output_text}\n<user>2\n<assistant>"
        assert other.previous_response_id == first.id


def responses_of(here: Site) -> Any:
    return here.router.store.responses


async def test_what_is_stored_is_read_listed_and_deleted(site: SiteMaker, server: EmbeddedServer) -> None:
    async with site(**storing(server)) as here, client_of(here) as client:
        first = await create(client, "one", include=["message.output_text.logprobs"])
        assert first.output[0].content[0].logprobs
        second = await create(client, "two", previous_response_id=first.id)
        await until(lambda: responses_of(here).pending == 0)
        found = await client.responses.retrieve(first.id)
        assert found.output[0].content[0].logprobs == []
        assert (found.output_text, found.usage) == (first.output_text, first.usage)
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [(item.type, item.role) for item in items] == [
            ("message", "user"),
            ("message", "assistant"),
            ("message", "user"),
        ]
        texts = [item.content[0].text for item in items]
        assert texts == ["one", first.output_text, "two"]
        newest = await client.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await create(client, "2", previous_response_id=first.id)
        assert missing.value.param == "previous_response_id"
        assert missing.value.code == "previous_response_not_found"
        # The next turn has its own copy.
        await create(client, "three", previous_response_id=second.id)
        assert prompt_of(here).startswith("<user>one\n")


async def test_a_request_may_say_that_nothing_is_stored(site: SiteMaker, server: EmbeddedServer) -> None:
    async with site(**storing(server)) as here, client_of(here) as client:
        first = await create(client, "one")
        other = await create(client, "two", previous_response_id=first.id, store=False)
        assert other.model_dump()["store"] is False
        assert prompt_of(here).startswith("<user>one\n")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(other.id)
        await until(lambda: responses_of(here).pending == 0)
        assert responses_of(here).written["stored"] == 1


CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "Warm?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "12"},
]


async def test_calls_and_large_conversations_are_continued(site: SiteMaker, server: EmbeddedServer) -> None:
    """Beyond 64 KiB a helper process reads them; what is stored is the same."""
    padding = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 70_000}]}
    async with site(**storing(server)) as here, client_of(here) as client:
        for items in (CALL, [*CALL, padding]):
            first = await create(client, items)
            prompt = prompt_of(here)
            second = await create(client, "Cold?", previous_response_id=first.id)
            whole = f"{prompt}{first.output_text}\n<user>Cold?\n<assistant>"
            assert prompt_of(here) == whole
            large = [padding, {"role": "user", "content": "Cold?"}]
            assert (
                await create(client, large, previous_response_id=first.id)
            ).output_text == second.output_text
            assert prompt_of(here) == whole
            listed = await client.responses.input_items.list(second.id, order="asc")
            kinds = [item.type for item in listed.data]
            assert kinds == [*(item.get("type", "message") for item in items), "message", "message"]


async def test_a_large_body_that_continues_a_response_is_judged_once(
    site: SiteMaker, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second job is given what the first has judged; a body that continues none has one job."""
    judged: list[bool] = []
    run = HelperProcesses.run

    async def noted(self: HelperProcesses, job: str, *given: Any, **options: Any) -> list[bytearray]:
        judged.extend([options.get("judged", False)] if job == "response" else [])
        return await run(self, job, *given, **options)

    monkeypatch.setattr(HelperProcesses, "run", noted)
    padding = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 70_000}]}
    async with site(**storing(server)) as here, client_of(here) as client, http(here) as plain:
        first = await create(client, "one")
        other = await create(client, "another")
        body = {"model": MODEL, "temperature": 0, "max_output_tokens": 4}
        large = {"input": [padding, {"role": "user", "content": "Cold?"}]}
        mine, others = {"previous_response_id": first.id}, {"metadata": {"previous_response_id": other.id}}
        for fields in ({**body, **mine, **large}, {**others, **body, **large, **mine}):
            judged.clear()
            answer = await plain.post("/v1/responses", json=fields)
            assert answer.status_code == 200, answer.text
            assert prompt_of(here) == f"<user>one\n<assistant>{first.output_text}\n<user>Cold?\n<assistant>"
            assert judged == [False, True]
        judged.clear()
        assert (await plain.post("/v1/responses", json={**others, **body, **large})).status_code == 200
        assert prompt_of(here).startswith("<user>Cold?")
        assert judged == [False]
        for wrong, status in (({"temperature": "hot"}, 400), ({}, 404)):
            unknown = {**body, "previous_response_id": f"resp_{'0' * 32}", **large, **wrong}
            assert (await plain.post("/v1/responses", json=unknown)).status_code == status


async def test_bounds(site: SiteMaker, server: EmbeddedServer) -> None:
    """A conversation is refused before it runs; an output that is too large is answered and counted."""
    async with site(**storing(server, max_kb=1)) as here, client_of(here) as client:
        reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 2000}]}
        large = [reasoning, {"role": "user", "content": "a"}]
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, large)
        assert (refused.value.param, refused.value.code) == ("store", "response_too_large")
        assert (await create(client, large, store=False)).output_text
        assert (await create(client, "a", instructions="x" * 150, metadata={"a": "b"})).output_text
        assert responses_of(here).written["too_large"] == 1
        assert responses_of(here).written["stored"] == 0
    body = ResponsesBody.parse({"model": MODEL, "input": [{"type": "reasoning"}] * 1025})
    with pytest.raises(FieldError) as many:
        stored_items(body)
    assert (many.value.param, many.value.code) == ("store", "response_too_large")


async def test_invalid_references(site: SiteMaker, server: EmbeddedServer) -> None:
    async with site(**storing(server)) as here, http(here) as client:
        for wrong in ("", "resp_1", "../x", "resp_" + "0" * 32, "resp_" + "A" * 32, "x" * 5000):
            answer = await client.post(
                "/v1/responses", json={"model": MODEL, "input": "a", "previous_response_id": wrong}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")
        body = {"model": MODEL, "input": "a", "previous_response_id": 5}
        assert (await client.post("/v1/responses", json=body)).status_code == 400
        first = (await client.post("/v1/responses", json={"model": MODEL, "input": "a"})).json()
        at = f"/v1/responses/{first['id']}"
        for query in ("?stream=true", "?include[]=message.output_text.logprobs"):
            assert (await client.get(at + query)).status_code == 400
        for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=msg_0"):
            assert (await client.get(f"{at}/input_items{query}")).status_code == 400
        assert (await client.get(at + "?stream=false")).status_code == 200
        assert not here.worker("decode-0").decode.reserves[1:]


async def test_answers_are_as_the_document_describes(site: SiteMaker, server: EmbeddedServer) -> None:
    async with site(**storing(server)) as here, http(here) as client:
        first = (await client.post("/v1/responses", json={"model": MODEL, "input": CALL})).json()
        body = {"model": MODEL, "input": "a", "previous_response_id": first["id"]}
        second = await client.post("/v1/responses", json=body)
        check("Response", second.json())
        at = f"/v1/responses/{second.json()['id']}"
        for schema, answer in (
            ("Response", await client.get(at)),
            ("ResponseItems", await client.get(f"{at}/input_items?limit=2")),
            ("ResponseItems", await client.get(f"{at}/input_items?order=asc")),
            ("DeletedResponse", await client.delete(at)),
            ("Error", await client.get(at)),
        ):
            check(schema, answer.json())


async def test_a_router_that_stores_none(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        at = f"/v1/responses/resp_{'0' * 32}"
        for answer in (
            await client.get(at),
            await client.get(f"{at}/input_items"),
            await client.delete(at),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_tenants_responses_are_its_own(
    site: SiteMaker, server: EmbeddedServer, tmp_path: Path
) -> None:
    keys = auth(tmp_path, tenant("acme", "sk-1"), tenant("other", "sk-2"))
    audit = tmp_path / "audit"
    async with site(**storing(server), auth=keys, audit_log=audit) as here:
        async with client_of(here, "sk-1") as acme, client_of(here, "sk-2") as other:
            first = await create(acme, "a secret")
            for written in (False, True):  # while it waits here, and once it is in Redis
                assert (responses_of(here).pending == 0) is written
                for refused in (
                    other.responses.retrieve(first.id),
                    other.responses.delete(first.id),
                    create(other, "b", previous_response_id=first.id),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await refused
                await until(lambda: responses_of(here).pending == 0)
            again = await acme.responses.retrieve(first.id)
            assert again.output_text == first.output_text
        async with http(here) as client:
            assert (await client.get(f"/v1/responses/{first.id}")).status_code == 401
            # Another tenant's is refused in the words for one that never was.
            key = {"authorization": "Bearer sk-2"}
            paths = (f"/v1/responses/{first.id}", f"/v1/responses/resp_{'0' * 32}")
            foreign, unknown = [await client.get(path, headers=key) for path in paths]
            assert (foreign.status_code, foreign.content) == (404, unknown.content)
            mine = {"authorization": "Bearer sk-1"}
            assert (await client.get(f"{paths[0]}/input_items", headers=mine)).status_code == 200
            assert (await client.delete(paths[0], headers=mine)).status_code == 200
    recorded = [one for one in audit_events(audit) if one["event"] == "response"]
    path, failed = "/v1/responses/{response_id}", {"event": "response", "outcome": "not_found"}
    refused_ones = [one for one in recorded if one["outcome"] == "not_found"]
    assert [(one["tenant"], one["route"], set(one)) for one in refused_ones] == [
        ("other", path, {*failed, "key_id", "tenant", "route"})
    ] * 6
    assert [
        (one["outcome"], one["tenant"], one["route"], one["target"])
        for one in recorded
        if one["outcome"] != "not_found"
    ] == [
        ("read", "acme", path, first.id),
        ("read", "acme", f"{path}/input_items", first.id),
        ("deleted", "acme", path, first.id),
    ]
    assert "a secret" not in audit.read_text()


async def test_reading_counts_for_the_tenant(site: SiteMaker, server: EmbeddedServer, tmp_path: Path) -> None:
    keys = auth(tmp_path, tenant("acme", "sk-1", requests_per_minute=4), tenant("other", "sk-2"))
    async with site(**storing(server), auth=keys) as here, http(here) as client:
        client.headers["authorization"] = "Bearer sk-1"
        missing = f"/v1/responses/resp_{'0' * 32}"
        calls = (("GET", missing), ("GET", f"{missing}/input_items"), ("DELETE", missing), ("GET", missing))
        assert [(await client.request(*call)).status_code for call in calls] == [404] * 4
        answer = await client.get(missing)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        client.headers["authorization"] = "Bearer sk-2"
        assert (await client.get(missing)).status_code == 404


async def test_redis_away(site: SiteMaker, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses are answered; what waits is found here; what needs Redis is 503 with Retry-After."""
    monkeypatch.setattr(stored_responses, "WRITE_S", 0.5)
    async with site(**storing(server)) as here, client_of(here) as client, http(here) as plain:
        stored = await create(client, "one")
        await until(lambda: responses_of(here).pending == 0)
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


async def test_a_router_that_could_not_read_them_again_does_not_start(server: EmbeddedServer) -> None:
    for state in (None, {"redis_url": server.url, "namespace": "ours"}):
        settings = {"state": state, "stored_responses": {"ttl_s": 60}}
        config = RouterConfig.model_validate({"model": "unused", "served_model_name": "a", **settings})
        with pytest.raises(BatonError, match=r"ttl_s needs"):
            Store(config.state, config.stored_responses)


async def test_a_response_that_another_router_still_writes_is_found() -> None:
    store = MemoryResponses(time.monotonic)
    reader = StoredResponses(store, ResponseStorage(ttl_s=60), settle_s=3.0)
    record, response_id = StoredResponse(b'{"output": []}', b"[]"), f"resp_{'1' * 32}"
    found = asyncio.create_task(reader.get(response_id))
    await asyncio.sleep(0)  # it has looked, and found nothing
    await asyncio.sleep(0.01)
    await store.put("", response_id, record.packed(), 60, 1 << 20)
    assert await found == record
    assert reader.reads == {"found": 1, "missing": 0, "failed": 0}


async def test_nothing_of_a_response_is_logged(
    site: SiteMaker, server: EmbeddedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor of one that is not found."""
    async with site(**storing(server)) as here, client_of(here) as client:
        stored = await create(client, "canary")
        await create(client, "canary", previous_response_id=stored.id)
        with pytest.raises(openai.NotFoundError):
            await create(client, "canary", previous_response_id="resp_canary")
        await until(lambda: responses_of(here).pending == 0)
        assert responses_of(here).written["stored"] == 2
    logged = capfd.readouterr()
    assert "request_ended" in logged.out + logged.err
    assert "canary" not in logged.out + logged.err


async def test_writes_that_wait_are_bounded() -> None:
    """Further ones are dropped and counted, and nothing is kept of them."""
    store = MemoryResponses(time.monotonic)
    store.unavailable = True
    responses = StoredResponses(store, ResponseStorage(ttl_s=60))
    record = StoredResponse(b"x" * 1_000_000, b"[]")
    for number in range(100):
        responses.keep(f"resp_{number:032}", record)
    assert responses.pending == stored_responses.MAX_PENDING_BYTES // len(record)
    assert responses.written["dropped"] == 100 - responses.pending
    store.unavailable = False
    await until(lambda: responses.pending == 0, 20)
    assert responses.pending_bytes == 0
    assert responses.written["stored"] == stored_responses.MAX_PENDING_BYTES // len(record)


def test_a_record_is_packed_and_continued() -> None:
    record = StoredResponse(b'{"id": "r", "output": [{"id": "o", "text": "\xc3\xa4"}]}', b'[{"id": "i"}]')
    assert StoredResponse.unpacked(record.packed()) == record
    assert len(record.packed()) == len(record)
    assert json.loads(record.conversation()) == [{"id": "i"}, {"id": "o", "text": "ä"}]
    empty = StoredResponse(b'{"output": []}', b"[]")
    assert empty.conversation() == b"[]"


def test_items_and_output_of_a_record_are_found_without_parsing() -> None:
    """Whatever texts are in them, in records of earlier versions too."""
    texts = (
        "a",
        "",
        'q"},{"id":"x","type',
        "line\nend",
        ',\n{"id":"y"}',
        "\\",
        '\\"',
        "ä\u2028",
        "[]",
        '{"output":\n',
    )
    items = [{"id": f'i{number}"\\', "type": "message", "content": text} for number, text in enumerate(texts)]
    document = {"id": "r", "instructions": list(texts), "output": items, "metadata": {"output": list(texts)}}
    for given in (items, items[:1], []):
        for lines in (encode_lines(given), encode(given).encode(), json.dumps(given).encode()):
            for whole in (stored_document(document), encode(document).encode()):
                record = StoredResponse.unpacked(StoredResponse(whole, lines).packed())
                assert json.loads(record.document) == document
                assert [json.loads(json_of(item)) for item in record.each_item()] == given
                assert [json.loads(id_of(item)) for item in record.each_item()] == [
                    one["id"] for one in given
                ]
                assert json.loads(record.conversation()) == [*given, *items]
