"""Bodies are read in time that their size bounds, and go between processes as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from baton.base.errors import FieldError
from baton.request_fields.table import MOST_ITEMS
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import Body
from services.router.formats.openai.tokenize_bodies import DetokenizeBody, TokenizeBody
from services.router.formats.responses.body import ResponsesBody

CONTEXT = 256
HELLO = {"role": "user", "content": [{"type": "text", "text": "h\u00e9"}], "mood": 1}
TOOL = {"name": "f", "parameters": {"type": "object"}}
# Of each endpoint a body with much in it.
BODIES: dict[type[Body], dict[str, Any]] = {
    ChatBody: {
        "model": "m",
        "messages": [HELLO],
        "tools": [{"type": "function", "function": TOOL}],
        "stream_options": {"include_usage": True},
        "prediction": {"type": "content", "content": "a"},
        "logit_bias": {"5": 1},
        "max_tokens": 3.0,
        "odd": 1,
    },
    CompletionBody: {
        "model": "m",
        "prompt": [[1], [2.0]],
        "stop": ["a"],
        "seed": 2**64 - 1,
        "temperature": 0.1,
    },
    ResponsesBody: {
        "model": "m",
        "input": [{"role": "user", "content": "a", "odd": 1}, {"type": "reasoning", "summary": []}],
        "tools": [{"type": "function", **TOOL}],
        "text": {"format": {"type": "json_object"}, "odd": 1},
        "include": ["message.output_text.logprobs"],
    },
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_packed_body_is_the_same(body: type[Body]) -> None:
    read = body.read(json.dumps(BODIES[body]).encode(), CONTEXT)
    again = body.unpacked(read.packed())
    assert again == read
    assert again.ignored == read.ignored
    assert bool(read.ignored) is (body is not CompletionBody)


@pytest.mark.parametrize(
    ("body", "given", "place"),
    [
        (ChatBody, {"prediction": "a"}, "prediction"),
        (ChatBody, {"response_format": "a"}, "response_format"),
        (ChatBody, {"messages": ["a"]}, "messages[0]"),
        (ChatBody, {"tools": [{"type": "function", "function": 1}]}, "tools[0].function"),
        (CompletionBody, {"stream_options": []}, "stream_options"),
        (ResponsesBody, {"text": {"format": 1}}, "text.format"),
    ],
)
def test_errors_say_object_and_name_no_class(body: type[Body], given: dict[str, Any], place: str) -> None:
    document = json.dumps(BODIES[body] | given).encode()
    with pytest.raises(FieldError) as refused:
        body.read(document, CONTEXT)
    assert refused.value.message == f"{place}: Input should be an object"


def test_what_is_nested_as_deeply_as_a_body_may_be_is_packed() -> None:
    schema: dict[str, Any] = {}
    for _ in range(251):
        schema = {"a": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    read = ChatBody.read(json.dumps({**BODIES[ChatBody], "tools": tools}).encode(), CONTEXT)
    assert ChatBody.unpacked(read.packed()) == read


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (body, name)
        for body in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)
        for name in body.model_fields
        if name not in MOST_ITEMS  # counted before
    ],
)
def test_an_invalid_list_costs_few_errors(body: type[Body], name: str) -> None:
    """An error for each item would take a tenth of a second for 64 KiB."""
    for wrong in ([None] * 100, ["a"] * 100, [1.5] * 100, [{"odd": 1}] * 100):
        assert _errors(body, {**BODIES.get(body, {}), name: wrong}) < 10


def _errors(body: type[Body], document: dict[str, Any]) -> int:
    try:
        body.model_validate(document)
    except ValidationError as error:
        return error.error_count()
    return 0
