"""Large conversations are stored: a helper process judges them once, and what is too large is refused."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from baton.base.errors import FieldError
from baton.state.embedded import EmbeddedServer
from services.common.config.router import ResponseStorage
from services.router.formats.responses.body import ResponsesBody
from services.router.formats.responses.conversation import stored_items
from services.router.tokenization.helper_processes import HelperProcesses
from tests.router.api.responses.storing_routers import (
    CALL,
    client_of,
    create,
    prompt_of,
    responses_of,
    storing,
)
from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import http


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
    """The second job is given the body that the first has judged; a body that continues none has one job."""
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


async def test_what_is_stored_is_as_large_as_a_body(site: SiteMaker, server: EmbeddedServer) -> None:
    for limits, most in (({"ttl_s": 60}, 70_000), ({"ttl_s": 60, "max_kb": 2}, 2048), ({}, 0)):
        assert ResponseStorage.model_validate(limits).most_bytes(70_000) == most
    assert ResponseStorage(ttl_s=60, max_mb_per_tenant=1).most_bytes(5 << 20) == 1 << 20
    async with site(**storing(server), max_body_bytes=70_000) as here, client_of(here) as client:
        padding = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 40_000}]}
        first = await create(client, [padding, {"role": "user", "content": "Warm?"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, [padding, {"role": "user", "content": "C"}], previous_response_id=first.id)
        assert "a stored conversation has at most 70000 bytes" in str(refused.value)


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
