"""The Responses API with OpenAI's client: whole and streamed, inputs of all kinds, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from services.router.formats.ignored_fields import HEADER
from services.router.formats.responses.body import ResponsesBody
from tests.router.conftest import MODEL, Site, SiteMaker
from tests.router.http_client import http

EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
ENDING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
LOGPROBS = ["message.output_text.logprobs"]


@asynccontextmanager
async def client_of(here: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"http://{here.addresses['http']}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as client:
        yield client


async def create(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    asked = {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 8, **fields}
    return await client.responses.create(**asked)


def prompt_of(here: Site) -> str:
    return bytes(here.worker("prefill-0").prefill.prompts[-1]).decode()


async def test_whole_and_streamed_are_the_same(site: SiteMaker) -> None:
    async with site() as here, client_of(here) as client:
        whole: Response = await create(client)
        assert (whole.status, whole.object, whole.error) == ("incomplete", "response", None)
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.model_dump()["store"] is whole.background is False
        assert whole.usage is not None
        assert (whole.usage.output_tokens, whole.usage.total_tokens) == (8, whole.usage.input_tokens + 8)
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=8
        )
        assert whole.output_text == chat.choices[0].message.content
        assert chat.usage is not None
        assert whole.usage.input_tokens == chat.usage.prompt_tokens
        events = [event async for event in await create(client, stream=True)]
        kinds = [event.type for event in events]
        texts = len(events) - len(EVENTS) - len(ENDING) - 1
        assert kinds == [*EVENTS, *["response.output_text.delta"] * texts, *ENDING, "response.incomplete"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        last = events[-1].response
        assert deltas == last.output_text == whole.output_text
        assert last.usage == whole.usage
        assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
        await here.quiet()


async def test_an_output_that_ends_by_itself_is_completed(site: SiteMaker) -> None:
    async with site() as here, client_of(here) as client:
        whole = await create(client)
        stop = whole.output_text[2:4]
        ended = await create(client, extra_body={"stop": [stop]})
        assert (ended.status, ended.incomplete_details) == ("completed", None)
        assert ended.completed_at >= ended.created_at
        assert ended.output_text == whole.output_text.partition(stop)[0]
        events = [event async for event in await create(client, stream=True, extra_body={"stop": [stop]})]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == ended.output_text


INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"input": "hi"}, "<user>hi\n<assistant>"),
    ({"input": "hi", "instructions": "Be brief."}, "<system>Be brief.\n<user>hi\n<assistant>"),
    (
        {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b", "annotations": []}],
                },
                {"role": "user", "content": "c"},
            ]
        },
        "<developer>Be brief.\n<user>a\n<assistant>b\n<user>c\n<assistant>",
    ),
    (
        {"input": "hi", "extra_body": {"chat_template_kwargs": {"mood": "good"}}},
        "<user>hi\n[good]<assistant>",
    ),
]


@pytest.mark.parametrize(("fields", "prompt"), INPUTS)
async def test_inputs(site: SiteMaker, fields: dict[str, Any], prompt: str) -> None:
    async with site() as here, client_of(here) as client:
        answer = await create(client, **fields)
        assert prompt_of(here) == prompt
        assert answer.instructions == fields.get("instructions")


async def test_a_large_input_is_answered_as_a_small_one(site: SiteMaker) -> None:
    """The input is tokenised in the helper process, which returns the rest of the body."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}], "mood": "x" * 70_000}]
    async with site() as here, http(here) as client:
        asked = {"model": MODEL, "max_output_tokens": 4, "temperature": 0, "input": items}
        large = await client.post("/v1/responses", json=asked)
        assert (large.status_code, large.headers[HEADER]) == (200, "input[].mood")
        small = await client.post("/v1/responses", json={**asked, "input": "a"})
        assert large.json()["output"][0]["content"] == small.json()["output"][0]["content"]
        assert large.json()["usage"]["input_tokens"] == small.json()["usage"]["input_tokens"]


async def test_logprobs(site: SiteMaker) -> None:
    async with site() as here, client_of(here) as client:
        whole = await create(client, include=LOGPROBS, top_logprobs=2)
        content = whole.output[0].content[0]
        assert len(content.logprobs) == 8
        assert {len(one.top_logprobs) for one in content.logprobs} == {2}
        events = [
            event async for event in await create(client, include=LOGPROBS, top_logprobs=2, stream=True)
        ]
        streamed = [one for event in events if event.type.endswith("text.delta") for one in event.logprobs]
        assert [one.logprob for one in streamed] == [one.logprob for one in content.logprobs]
        bare = await create(client, include=LOGPROBS)
        assert [one.top_logprobs for one in bare.output[0].content[0].logprobs] == [[]] * 8
        assert (await create(client)).output[0].content[0].logprobs == []


TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_calls_and_results_become_turns() -> None:
    items = [
        {"role": "user", "content": "Warm?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "x"}],
        },
        {"role": "assistant", "content": "I look."},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Bern"}',
        },
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "no JSON"},
        {"type": "function_call_output", "call_id": "c1", "output": "12 degrees"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
    ]
    fields = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    parsed = ResponsesBody.parse({"model": MODEL, "input": items, **fields}).parsed_request()
    assert parsed.chat is not None
    user, assistant, first, second = parsed.chat.turns
    assert (user.content, assistant.content) == ("Warm?", "I look.")
    assert assistant.tool_calls == (
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
        {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "no JSON"}},
    )
    results = [(turn.role, turn.content, turn.tool_call_id) for turn in (first, second)]
    assert results == [("tool", "12 degrees", "c1"), ("tool", "ok", "c2")]
    assert parsed.tools is not None
    assert [tool.name for tool in parsed.tools.forced] == ["weather"]
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    assert list(parsed.chat.tools) == [{"type": "function", "function": function}]
    none = ResponsesBody.parse({"model": MODEL, "input": "a", "tools": [TOOL], "tool_choice": "none"})
    assert (none.parsed_request().tools, list(none.parsed_request().chat.tools)) == (None, [])  # type: ignore[union-attr]


async def test_tools_are_repeated_in_the_response(site: SiteMaker) -> None:
    async with site(tool_calls="hermes") as here, client_of(here) as client:
        answer = await create(client, tools=[TOOL], parallel_tool_calls=False)
        assert [tool.name for tool in answer.tools] == ["weather"]
        assert (answer.tool_choice, answer.parallel_tool_calls) == ("auto", False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input"),
    ({"input": [{"content": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b"}]}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "warm"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"role": "user", "content": "x" * 300}]}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * 300}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"text": {"verbosity": "high"}}, "text"),
    ({"include": ["secrets"]}, "include"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
]


async def test_refusals(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for fields, param in REFUSED:
            asked = {"model": MODEL, "input": "a", "max_output_tokens": 4, **fields}
            answer = await client.post("/v1/responses", json=asked)
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.json()["error"]["param"] == param, (fields, answer.text)
        assert not here.worker("decode-0").decode.reserves
        other = await client.post("/v1/responses", json={"model": "other", "input": "a"})
        assert other.status_code == 404


async def test_what_agents_send_is_accepted(site: SiteMaker) -> None:
    async with site() as here, client_of(here) as client:
        answer = await create(
            client,
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=True,
            store=True,
            include=["reasoning.encrypted_content"],
            metadata={"run": "7"},
            reasoning={},
            text={"format": {"type": "text"}},
            truncation="disabled",
            user="somebody",
            stream_options={"include_obfuscation": False},
            service_tier="auto",
        )
        assert answer.usage.output_tokens == 8


async def test_a_request_that_fails_before_a_token_has_its_own_status(site: SiteMaker) -> None:
    async with site(max_attempts=1) as here, client_of(here) as client:
        here.worker("prefill-0").behaviour.break_prefills = 1
        with pytest.raises(openai.APIStatusError) as failed:
            await create(client, stream=True)
        assert failed.value.status_code == 503


async def test_a_stream_that_fails_later_ends_with_response_failed(site: SiteMaker) -> None:
    async with site(max_attempts=1) as here, client_of(here) as client:
        prefill = here.worker("prefill-0").behaviour
        prefill.break_prefills, prefill.break_at = 1, "first"
        events = [event async for event in await create(client, stream=True)]
        assert [event.type for event in events][:2] == EVENTS[:2]
        assert events[-1].type == "response.failed"
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert "attempts" in failed.error.message
