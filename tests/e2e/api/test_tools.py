"""Tool calls through a real cluster: forced ones always parse, and their arguments match the tool's
schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import openai
import pytest

import baton.client
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, Tool, ToolCall, ToolChoice
from baton.v1.types_pb2 import FinishReason
from models.demo_training.evaluate import DEMO_MODEL
from services.router.tools.families import FAMILIES
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up
from tests.support.json_schemas import Schema, schemas, validator_of

STREAMS = 32
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
PARAMETERS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Bern?"}]
RESULT = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
]


def client_of(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120)


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    """The whole answer, as OpenAI's client has it."""
    model = (await client.models.list()).data[0].id
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, **fields}
    return await client.chat.completions.create(model=model, **fields)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason of one choice that comes in pieces."""
    content, calls, finish = "", list[tuple[str, str]](), ""
    async for chunk in await ask(client, stream=True, **fields):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    calls.append((call.function.name, ""))
                name, before = calls[call.index]
                calls[call.index] = name, before + call.function.arguments
    return content, calls, finish


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def check(calls: list[tuple[str, str]]) -> None:
    """Raises where a call is of no tool, or its arguments are not what the tool takes."""
    for name, arguments in calls:
        validator_of(PARAMETERS[name]).validate(json.loads(arguments))


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
async def test_forced_calls_whole_and_streamed(cluster: Cluster, temperature: float) -> None:
    """All at once, as in the tests below: outputs that share their steps take less processor time."""
    async with client_of(cluster) as client:

        async def one(seed: int, choice: object) -> None:
            fields: dict[str, Any] = {
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "temperature": temperature,
                "seed": seed,
            }
            answer, pieces = await asyncio.gather(ask(client, **fields), streamed(client, **fields))
            (whole,) = answer.choices
            assert pieces == ("", calls_of(whole), "tool_calls")
            assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
            check(calls_of(whole))
            assert len(calls_of(whole)) == 1
            if choice != "required":
                assert calls_of(whole)[0][0] == "weather"

        await asyncio.gather(
            one(0, "required"), one(1, {"type": "function", "function": {"name": "weather"}})
        )
    await assert_all_free(cluster, within_s=5)


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_the_same_over_grpc(cluster: Cluster, large: bool) -> None:
    """A small message, and one that a helper process parses and tokenises."""
    tools = [
        Tool(name="weather", description="?", parameters=json.dumps(WEATHER)),
        Tool(name="now", description="!" * (70_000 if large else 1)),
    ]
    turns = [
        ChatMessage(role="user", content=MESSAGES[0]["content"]),
        ChatMessage(role="assistant", tool_calls=[ToolCall(id="call_1", name="now", arguments="{}")]),
        ChatMessage(role="tool", content="noon", tool_call_id="call_1"),
    ]
    async with cluster.stub() as stub:

        async def one(choice: ToolChoice.ValueType, name: str) -> None:
            chat = ChatMessages(
                messages=turns, tools=tools, tool_choice=choice, tool_name=name, parallel_tool_calls=False
            )
            request = GenerateRequest(model=MODEL, chat=chat, max_tokens=300, seed=2)
            calls: dict[int, tuple[str, str]] = {}
            async for message in stub.Generate(request, timeout=60):
                assert not message.text
                for call in message.tool_calls:
                    known, before = calls.get(call.index, (call.name, ""))
                    calls[call.index] = known, before + call.arguments
            assert message.finish_reason == FinishReason.FINISH_REASON_TOOL_CALLS
            assert list(calls) == [0]
            assert name in ("", calls[0][0])
            check(list(calls.values()))

        await asyncio.gather(
            one(ToolChoice.TOOL_CHOICE_REQUIRED, ""), one(ToolChoice.TOOL_CHOICE_NAMED, "weather")
        )
        for wrong in (
            ChatMessages(messages=turns, tool_choice=ToolChoice.TOOL_CHOICE_REQUIRED),
            ChatMessages(messages=turns, tools=[Tool(name="a b")]),
            ChatMessages(messages=turns, tools=[Tool(name="f", parameters="[")]),
            ChatMessages(
                messages=turns, tools=tools, tool_choice=ToolChoice.TOOL_CHOICE_NAMED, tool_name="x"
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(GenerateRequest(model=MODEL, chat=wrong), timeout=60):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_batons_own_client_calls_tools(cluster: Cluster) -> None:
    tools = [baton.client.Tool("weather", "?", WEATHER), baton.client.Tool("now")]
    asked = baton.client.Message("user", "How is the weather in Bern?")
    async with await baton.client.AsyncClient.connect(cluster.grpc_address) as client:
        fields: dict[str, Any] = {"tools": tools, "max_tokens": 300, "parallel_tool_calls": False, "seed": 3}
        called = await asyncio.gather(
            *(client.complete([asked], tool_choice=name, **fields) for name in ("required", "weather"))
        )
        for answer in called:
            (choice,) = answer.choices
            assert (choice.text, choice.finish_reason) == ("", baton.client.FinishReason.TOOL_CALLS)
            (call,) = choice.tool_calls
            check([(call.name, call.arguments)])
        answered = baton.client.Message("assistant", tool_calls=choice.tool_calls)
        result = baton.client.Message("tool", "rain", tool_call_id=call.id)
        last = await client.complete(
            [asked, answered, result], tool_choice="none", **{**fields, "max_tokens": 5}
        )
        assert last.choices[0].tool_calls == ()
        with pytest.raises(baton.client.BatonError, match="need messages"):
            await client.complete("a", tools=tools)


async def test_a_model_that_may_choose_is_not_guided(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        for choice in ("auto", "none"):
            fields: dict[str, Any] = {"tool_choice": choice, "temperature": 0, "max_tokens": 20}
            whole, pieces = await asyncio.gather(ask(client, **fields), streamed(client, **fields))
            (answer,) = whole.choices
            assert calls_of(answer) == []
            assert pieces[0] == answer.message.content
        answer = (await ask(client, messages=[*MESSAGES, *RESULT], max_tokens=5)).choices[0]
        assert answer.finish_reason in ("stop", "length")


async def test_several_outputs_of_several_calls(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        answer = await ask(client, tool_choice="required", n=4, seed=1, temperature=1.2, max_tokens=800)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert 1 <= len(calls_of(choice)) <= 16
        if choice.finish_reason == "tool_calls":
            check(calls_of(choice))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
]


async def test_what_is_refused(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        for fields, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, **fields)
            assert caught.value.param == param, fields


def arguments_of(schema: Schema) -> Schema:
    """Parameters of a function: the schema itself, or an object with one member of it."""
    if schema.get("type") == "object":
        return schema
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_200_prompts_on_the_demo_model_parse(family: str) -> None:
    """Each with other tools, whose parameters are random schemas."""
    parameters = schemas(200, seed=3)
    counted = {"stop": 0, "length": 0}
    with baton_up(DEMO_MODEL, "--slots", str(STREAMS), "--tool-calls", family) as demo:
        streams = asyncio.Semaphore(STREAMS)
        async with client_of(demo) as client:

            async def one(number: int) -> None:
                schema = arguments_of(parameters[number])
                tools = [{"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}]
                async with streams:
                    content, calls, finish = await streamed(
                        client,
                        messages=[{"role": "user", "content": f"Call tool number {number}."}],
                        tools=tools,
                        tool_choice="required",
                        parallel_tool_calls=False,
                        temperature=number % 2,
                        seed=number,
                        max_tokens=512,
                    )
                assert content == ""
                ((name, arguments),) = calls
                assert name == f"tool_{number}"
                counted["stop" if finish == "tool_calls" else finish] += 1
                if finish == "tool_calls":
                    validator_of(schema).validate(json.loads(arguments))

            async with asyncio.TaskGroup() as tasks:
                for number in range(200):
                    tasks.create_task(one(number))
    print(family, counted)
    assert counted["length"] <= 4
