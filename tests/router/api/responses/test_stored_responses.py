"""Stored responses with OpenAI's client: continued, read, listed and deleted, by their tenant alone."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response

from baton.base.errors import BatonError
from baton.state.embedded import EmbeddedServer
from services.common.config.router import RouterConfig
from services.router.observability.store import Store
from tests.router.api.responses.storing_routers import (
    CALL,
    client_of,
    create,
    prompt_of,
    responses_of,
    storing,
)
from tests.router.api.test_openapi import check
from tests.router.conftest import MODEL, SiteMaker, until
from tests.router.http_client import http


async def test_a_conversation_goes_on_by_its_id(site: SiteMaker, server: EmbeddedServer) -> None:
    """Conversations go on whole and streamed, with a text and with items, from each of their turns, and at
    another router."""
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


async def test_a_router_that_could_not_read_them_again_does_not_start(server: EmbeddedServer) -> None:
    for state in (None, {"redis_url": server.url, "namespace": "ours"}):
        settings = {"state": state, "stored_responses": {"ttl_s": 60}}
        config = RouterConfig.model_validate({"model": "unused", "served_model_name": "a", **settings})
        with pytest.raises(BatonError, match=r"ttl_s needs"):
            Store(config.state, config.stored_responses)


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
