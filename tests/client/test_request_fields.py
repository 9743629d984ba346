"""The client can say whatever a GenerateRequest can."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message as Proto

from baton.client import BatonError, ErrorKind, Message, Prompt, Sampling, Tool, ToolCall
from baton.client.request import to_request
from baton.v1.router_pb2 import GenerateRequest
from tests.client.test_client import both, complete
from tests.router.conftest import SiteMaker
from tests.router.fake_model import expected

CALL = ToolCall("1", "f", "{}")
CHAT = [
    Message("user", "a", name="n"),
    Message("assistant", reasoning="r", tool_calls=(CALL,)),
    Message("tool", "b", tool_call_id="1"),
]
NUMBERS: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "n": 2,
    "presence_penalty": 1.0, "frequency_penalty": -1.0, "logit_bias": {4: -2.0}, "seed": 9, "logprobs": 2,
    "max_tokens": 5, "min_tokens": 2, "stop_token_ids": [9], "priority": 1, "ttft_slo_ms": 5.0,
    "tpot_slo_ms": 6.0, "top_n_sigma": 1.5, "max_draft_tokens": 3, "prediction": "b",
}  # fmt: skip
# Requests that have every argument of the client between them.
ASKS: list[tuple[Prompt, dict[str, Any]]] = [
    ("a", {**NUMBERS, "stop": "b", "echo": True, "ignore_eos": True, "add_special_tokens": False}),
    ([1, 2], {"skip_special_tokens": False, "json_schema": {"type": "object"}, "whitespace_pattern": " *"}),
    ([1, 2], {"regex": "a"}),
    ([1, 2], {"choice": ["a"]}),
    ([1, 2], {"grammar": "start: /a/"}),
    ([1, 2], {"json_object": True}),
    (
        CHAT,
        {
            "tools": [Tool("f", "d", {"type": "object"})],
            "tool_choice": "f",
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"mood": "good"},
            "add_generation_prompt": False,
        },
    ),
]
# Fields that the client deliberately does not have.
ABSENT: set[str] = set()


def paths(message: Descriptor, within: str = "") -> set[str]:
    """The fields of a message and of those in it."""
    found = set()
    for field in message.fields:
        name = within + field.name
        found |= paths(field.message_type, f"{name}.") if field.message_type is not None else {name}
    return found


def set_paths(message: Proto, within: str = "") -> set[str]:
    """The paths of all fields that are set in a message."""
    found = set()
    for field, value in message.ListFields():
        name = within + field.name
        if field.message_type is None:
            found.add(name)
            continue
        for one in value if isinstance(value, list) or not isinstance(value, Proto) else [value]:
            found |= set_paths(one, f"{name}.")
    return found


def test_every_field_has_an_argument() -> None:
    assert {name for _, fields in ASKS for name in fields} == Sampling.__annotations__.keys()
    sent: set[str] = set()
    for prompt, fields in ASKS:
        sent |= set_paths(to_request("m", prompt, **fields))
    assert sent | ABSENT == paths(GenerateRequest.DESCRIPTOR)
    assert not sent & ABSENT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [Tool("f")]}, "tools need messages"),
        ({"chat_template_kwargs": {}}, "need messages"),
        ({"add_generation_prompt": True}, "need messages"),
        ({"whitespace_pattern": " "}, "whitespace_pattern needs"),
        ({"json_object": True, "regex": "a"}, "only one of"),
        ({"add_special_tokens": "yes"}, "not a request: add_special_tokens: "),
        ({"max_draft_tokens": -1}, "not a request: max_draft_tokens: "),
        ({"top_k": 1.5}, "not a request: top_k: "),
        ({"prediction": ["a"]}, "not a request: prediction: "),
        ({"odd": 1}, "not a request: odd: "),
    ],
)
def test_what_fits_no_field_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BatonError, match=message) as refused:
        to_request("m", "a", **fields)
    assert refused.value.kind is ErrorKind.INVALID


@both
async def test_a_template_gets_its_variables(site: SiteMaker, kind: str) -> None:
    async with site() as here:
        fields: dict[str, Any] = {"chat_template_kwargs": {"mood": "good"}, "add_generation_prompt": False}
        answer = await complete(kind, here, [Message("user", "hi")], max_tokens=4, **fields)
        assert answer.tokens == tuple(expected(list(b"<user>hi\n[good]"), 4))
