"""Chats and responses, whole and streamed, and gRPC say the same of an output, however it comes."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from baton.v1.router_pb2 import GenerateResponse
from baton.v1.types_pb2 import FinishReason
from services.router.api.grpc_api import add_structure
from services.router.api.openai_response import CompletionResponse
from services.router.api.responses_answer import ResponsesAnswer
from services.router.formats.openai.chat import ChatBody, ChatFormatter
from services.router.formats.responses.body import ResponsesBody
from services.router.request.request import Delta
from services.router.text.token_texts import TokenTexts
from services.router.tools import call_parser
from services.router.tools.conversation_format import ConversationFormat
from services.router.tools.families import FAMILIES, HERMES, ToolFamily
from services.router.tools.output_parser import OutputParser, OutputStructure
from services.router.tools.tool_use import ToolUse
from tests.router.api.golden_streams import MESSAGES, ScriptedDispatcher, deltas, request_of
from tests.router.conftest import MODEL, SiteMaker, byte_tokenizer
from tests.router.tools.model_outputs import USE, cuts_of, outputs_of

TEXTS = TokenTexts(byte_tokenizer())
COUNTS = [pytest.param(40, 1, id="some"), pytest.param(300, 60, id="all", marks=pytest.mark.slow)]
# Content, calls, and the finish reason or status.
Answer = tuple[str, list[tuple[str, str]], str]


def structure_of(family: ToolFamily, use: ToolUse = USE, **more: Any) -> OutputStructure:
    structure = ConversationFormat(family).structure(use, "", guided=False)
    assert structure is not None
    return dataclasses.replace(structure, **more)


class Asked:
    """The answers of both HTTP APIs to an output that comes in these parts."""

    def __init__(
        self, structure: OutputStructure | None, parts: Sequence[Delta], error: Exception | None = None
    ) -> None:
        self._script = [(0, dataclasses.replace(part)) for part in parts]
        self._error = error
        self._request = dataclasses.replace(request_of(), structure=structure)

    async def chat(self, *, stream: bool) -> bytes:
        """The body of a chat's answer."""
        body = ChatBody.parse(
            {"model": MODEL, "messages": MESSAGES, "stream_options": {"include_usage": True}}
        )
        answer = CompletionResponse(
            ScriptedDispatcher(self._script, self._error),
            MODEL,
            [self._request],
            ChatFormatter(body, TEXTS),
            body.stream_options,
        )
        return await sent_by(answer, stream=stream)

    async def response(self, *, stream: bool) -> bytes:
        """The body of a response."""
        body = ResponsesBody.parse({"model": MODEL, "input": "hi"})
        dispatcher = ScriptedDispatcher(self._script, self._error)
        return await sent_by(ResponsesAnswer(dispatcher, body, self._request, TEXTS), stream=stream)


async def sent_by(answer: CompletionResponse | ResponsesAnswer, *, stream: bool) -> bytes:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await (answer.stream(send) if stream else answer.whole(send))
    return b"".join(sent)


def events_of(body: bytes) -> list[Any]:
    lines = body.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def of_chat(body: bytes) -> Answer:
    """The answer to a chat, sent whole."""
    (choice,) = json.loads(body)["choices"]
    calls = [one["function"] for one in choice["message"].get("tool_calls", ())]
    content = choice["message"]["content"] or ""
    return content, [(one["name"], one["arguments"]) for one in calls], choice["finish_reason"]


def of_chunks(body: bytes) -> Answer:
    """The answer to a chat, sent as a stream."""
    content, finish, calls = "", "", list[tuple[str, str]]()
    for event in events_of(body):
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append((call["function"]["name"], ""))
                name, before = calls[call["index"]]
                calls[call["index"]] = name, before + call["function"]["arguments"]
    return content, calls, finish


def items_of(response: Any) -> list[dict[str, Any]]:
    """The output items of a response, without their ids."""
    return [
        {key: one for key, one in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]


def of_items(items: list[dict[str, Any]]) -> Answer:
    """The same of a response as of a chat."""
    calls = [item for item in items if item["type"] == "function_call"]
    content = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
    closed = any(call["status"] == "completed" for call in calls)
    return content, [(one["name"], one["arguments"]) for one in calls], "tool_calls" if closed else "stop"


def of_messages(structure: OutputStructure, parts: Sequence[Delta]) -> Answer:
    """The same of the messages of a gRPC call."""
    parser, content, reason = OutputParser(structure), "", "stop"
    calls: list[tuple[str, str]] = []
    for part in parts:
        message = GenerateResponse()
        add_structure(message, parser, part)
        content += message.text
        for call in message.tool_calls:
            if call.id:
                calls.append((call.name, ""))
            name, before = calls[call.index]
            calls[call.index] = name, before + call.arguments
        if message.finish_reason == FinishReason.FINISH_REASON_TOOL_CALLS:
            reason = "tool_calls"
    return content, calls, reason


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(("count", "cuts"), COUNTS)
async def test_all_answers_to_an_output_are_one(family: ToolFamily, count: int, cuts: int) -> None:
    structure = structure_of(family)
    for number, output in enumerate(outputs_of(family, count, seed=2)):
        expected = of_chat(await Asked(structure, deltas(output.text)).chat(stream=False))
        closed = expected[2] == "tool_calls"
        assert closed == bool(output.calls)
        whole = json.loads(await Asked(structure, deltas(output.text)).response(stream=False))
        items = items_of(whole)
        assert of_items(items) == expected
        _, *ways = cuts_of(output.text, random.Random(number), cuts)
        for parts in ways[-1 - cuts :]:
            asked = Asked(structure, deltas(*parts))
            assert of_chunks(await asked.chat(stream=True)) == expected
            assert of_chat(await asked.chat(stream=False)) == expected
            *_, last = events_of(await asked.response(stream=True))
            assert items_of(last["response"]) == items
            assert of_messages(structure, deltas(*parts)) == expected


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_one_call_where_calls_must_not_be_parallel(family: ToolFamily) -> None:
    structure = structure_of(family, dataclasses.replace(USE, only_one=True))
    several = [one for one in outputs_of(family, 40, seed=3) if len(one.calls) > 1]
    assert several
    for output in several[:3]:
        *_, parts = cuts_of(output.text, random.Random(4), 1)
        asked = Asked(structure, deltas(*parts))
        content, calls, _ = of_chat(await asked.chat(stream=False))
        every = of_chat(await Asked(structure_of(family), deltas(output.text)).chat(stream=False))
        assert (content, calls) == (every[0], every[1][:1])
        assert of_chunks(await asked.chat(stream=True))[1] == calls


THOUGHT, REST = "\nHm, zwölf\n\n", "\n\nIt is 4."


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("family", [None, HERMES])
async def test_tokens_of_reasoning_are_counted(family: ToolFamily | None, within: bool) -> None:
    opening = "" if within else " <think>"
    for end, thought in (("</think>" + REST, THOUGHT), ("", THOUGHT), (None, "")):
        text = REST if end is None else f"{opening}{thought}{end}"
        if end is None and within:
            continue
        structure = OutputStructure(family, {}, reasoning=True, within=within)
        for parts in cuts_of(text, random.Random(5), None):
            asked = Asked(structure, with_offsets(parts))
            chat = json.loads(await asked.chat(stream=False))["usage"]
            streamed = events_of(await asked.chat(stream=True))[-1]["usage"]
            response = json.loads(await asked.response(stream=False))["usage"]
            *_, last = events_of(await asked.response(stream=True))
            assert chat == streamed
            assert response == last["response"]["usage"]
            # A token for each byte; those of one character begin at the same place.
            expected = len(thought.encode())
            assert chat["completion_tokens_details"] == {"reasoning_tokens": expected}
            assert response["output_tokens_details"] == {"reasoning_tokens": expected}
    plain = json.loads(await Asked(None, deltas("4")).chat(stream=False))["usage"]
    assert "completion_tokens_details" not in plain


def with_offsets(parts: Sequence[str]) -> list[Delta]:
    """Deltas of these texts, with the place where the text of each token begins."""
    made, length = deltas(*parts), 0
    for delta, text in zip(made, parts, strict=True):
        delta.offsets = [length + at for at, one in enumerate(text) for _ in one.encode()]
        length += len(text)
    return made


async def test_an_output_is_text_where_its_parser_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(call_parser, "JsonCall", fail)
    text = 'Look. <tool_call>{"name": "now"}</tool_call> So.'
    for parts in cuts_of(text, random.Random(6), None):
        asked = Asked(structure_of(HERMES), deltas(*parts))
        assert of_chat(await asked.chat(stream=False)) == (text, [], "stop")
        assert of_chunks(await asked.chat(stream=True)) == (text, [], "stop")
        assert items_of(json.loads(await asked.response(stream=False)))[0]["content"][0]["text"] == text


async def test_a_stream_that_fails_ends_with_an_error() -> None:
    asked = Asked(None, deltas("Hel", finish=None), TypeError("secret"))
    chat = events_of(await asked.chat(stream=True))
    assert (chat[-1]["error"]["type"], "secret" in str(chat)) == ("server_error", False)
    response = events_of(await asked.response(stream=True))
    assert response[-1]["type"] == "response.failed"
    for whole in (asked.chat, asked.response):
        with pytest.raises(TypeError):
            await whole(stream=False)


async def test_tokens_of_reasoning_are_counted_by_a_router(site: SiteMaker) -> None:
    """All of the output, since the prompt ends with the opening mark and the model never closes it."""
    fields = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    thinking = [{"role": "user", "content": "x<think>"}]
    chat = {**fields, "messages": thinking, "add_generation_prompt": False, "max_tokens": 30}
    async with (
        site(reasoning="think") as here,
        httpx.AsyncClient(base_url=f"http://{here.addresses['http']}") as http,
    ):
        whole = (await http.post("/v1/chat/completions", json=chat)).json()
        asked = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        streamed = events_of((await http.post("/v1/chat/completions", json=asked)).content)
    assert whole["choices"][0]["message"]["reasoning_content"]
    count = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < count <= 30
    assert streamed[-1]["usage"] == whole["usage"]
