"""Streams are byte for byte what the golden files hold, and OpenAI's own client parses them."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from tests.router.api.golden_streams import CASES, FOLDER, STRUCTURES, file_of, stream_of
from tests.router.conftest import MODEL


def test_every_golden_file_has_a_case() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", list(CASES))
def test_the_stream_is_the_golden_file(name: str) -> None:
    """Golden files are written again by `python -m tests.router.api.golden_streams`, where a change is
    meant."""
    assert stream_of(name) == file_of(name).read_bytes()


CITY = ("weather", '{"city": "Zürich"}')
# Name → content, reasoning, calls, finish reason.
STRUCTURED: dict[str, tuple[str, str, list[tuple[str, str]], str]] = {
    "tools-hermes": ("I will look.", "", [CITY, ("f", "{}")], "tool_calls"),
    "tools-llama3": ("", "", [("weather", '{"city": "Bern", "days": [1, 2]}')], "tool_calls"),
    "tools-mistral": ("", "", [("weather", '{"city": "Ber')], "length"),
    "tools-none-called": ("It is warm.", "", [], "stop"),
    "tools-logprobs": ("", "", [("f", "{}")], "tool_calls"),
    "reasoning": ("It is 4.", "Hm, 2 and 2", [], "stop"),
}


def found_in(choices: list[Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    """The outputs that a client puts together from a stream."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for choice in choices:
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function")
                calls.append((call.function.name, ""))
            name, before = calls[call.index]
            calls[call.index] = name, before + call.function.arguments
    return content, reasoning, calls, choices[-1].finish_reason


# Name → the items of a response: type, and text or name and arguments; and its status.
ITEMS: dict[str, tuple[list[tuple[str, ...]], str]] = {
    "response-tools": (
        [
            ("message", "I will look."),
            ("function_call", "weather", '{"city": "Zürich"}'),
            ("function_call", "f", "{}"),
        ],
        "completed",
    ),
    "response-cut-call": ([("function_call", "weather", '{"city": "Ber')], "incomplete"),
    "response-reasoning": ([("reasoning", "Hm, 2 and 2"), ("message", "It is 4.")], "completed"),
    "response-incomplete": ([("message", "Hello")], "incomplete"),
}


def check_response(name: str, events: list[Any], *, failed: bool, text: str) -> None:
    """The last event has the whole response, and the others add up to it."""
    last = events[-1].response
    if failed:
        assert (last.status, last.error.code) == ("failed", "server_error")
        return
    items, status = ITEMS.get(name, ([("message", text)], "completed"))
    found = [
        (one.type, one.name, one.arguments)
        if one.type == "function_call"
        else (one.type, one.content[0].text)
        for one in last.output
    ]
    assert (found, last.status) == (items, status)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output
    for index, (_, *wanted) in enumerate(items):
        deltas = [one for one in events if one.type.endswith(".delta") and one.output_index == index]
        assert "".join(one.delta for one in deltas) == wanted[-1]
        assert {one.item_id for one in deltas} <= {last.output[index].id}
    assert len({one.id for one in last.output}) == len(items)


@pytest.mark.parametrize("name", list(CASES))
def test_openais_client_parses_it(name: str) -> None:
    path, fields, script, error = CASES[name]
    answer = httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, content=file_of(name).read_bytes()
    )
    http = httpx2.Client(transport=httpx2.MockTransport(lambda _: answer))
    text = "".join(delta.text for index, delta in script if not index)
    with openai.OpenAI(base_url="http://golden/v1", api_key="unused", http_client=http) as client:
        if path == "responses":
            events: list[Any] = list(client.responses.create(model=MODEL, input="hi", stream=True))
            assert all(type(event).__name__.startswith("Response") for event in events)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            check_response(name, events, failed=error is not None, text=text)
            return
        create: Any = client.chat.completions.create if path == "chat" else client.completions.create
        asked: dict[str, Any] = {"messages": []} if path == "chat" else {"prompt": "hi"}
        stream = create(model=MODEL, stream=True, **asked)
        chunks: list[Any] = []
        if error is not None:
            with pytest.raises(openai.APIError, match="gave up after 3 attempts"):
                chunks.extend(stream)
            return
        chunks.extend(stream)
        choices = [choice for chunk in chunks for choice in chunk.choices if not choice.index]
        if name in STRUCTURES:
            assert found_in(choices) == STRUCTURED[name]
            return
        parts = [choice.delta.content if path == "chat" else choice.text for choice in choices]
        assert "".join(part or "" for part in parts) == text
        assert choices[-1].finish_reason in ("stop", "length")
        if "stream_options" in fields:
            assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], 3)
