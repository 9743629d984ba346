"""Sizes of a body are counted exactly, before anything is built of it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.base.errors import FieldError
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds
from baton.v1.types_pb2 import LogitBias
from services.router.request.sizes import check_document, check_message, is_large, max_body_bytes

CONTEXT = 500


def message(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


# A body with the most that is allowed, one with a bit more, and the field to blame.
DOCUMENTS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({str(n): 1 for n in range(128)}, {str(n): 1 for n in range(129)}, None),
    ({"logit_bias": dict.fromkeys(range(300))}, {"logit_bias": dict.fromkeys(range(301))}, "logit_bias"),
    ({"stop": ["a"] * 16}, {"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1024}, {"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [1] * 8}, {"stop_token_ids": [1] * 9}, "stop_token_ids"),
    ({"messages": [{}] * CONTEXT}, {"messages": [{}] * (CONTEXT + 1)}, "messages"),
    (
        {"messages": [message(*"a" * 250), message(*"a" * 250)]},
        {"messages": [message(*"a" * 250), message(*"a" * 251)]},
        "messages",
    ),
    (
        {"messages": [dict.fromkeys(map(str, range(32)))]},
        {"messages": [{}, dict.fromkeys(map(str, range(33)))]},
        "messages",
    ),
    ({"tools": [{}] * 128}, {"tools": [{}] * 129}, "tools"),
    (
        {"chat_template_kwargs": dict.fromkeys(range(128))},
        {"chat_template_kwargs": dict.fromkeys(range(129))},
        "chat_template_kwargs",
    ),
    ({"prompt": [1] * CONTEXT}, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
    ({"prompt": [[1], [1] * CONTEXT]}, {"prompt": [[1], [1] * (CONTEXT + 1)]}, "prompt"),
    ({"prompt": "a" * 1000}, {"prompt": ["a"] * (CONTEXT + 1)}, "prompt"),
]


@pytest.mark.parametrize(("most", "above", "param"), DOCUMENTS)
def test_documents(most: dict[str, Any], above: dict[str, Any], param: str | None) -> None:
    check_document(most, CONTEXT)
    with pytest.raises(FieldError) as caught:
        check_document(above, CONTEXT)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "odd", [None, [], "a", 5, {"messages": 5, "prompt": {}, "stop": 1, "logit_bias": None}]
)
def test_other_types_are_left_to_the_parser(odd: object) -> None:
    check_document(odd, CONTEXT)


@pytest.mark.parametrize(
    ("field", "most", "one"),
    [("logit_bias", 300, LogitBias()), ("stop", 16, "a"), ("stop_token_ids", 8, 1)],
)
def test_messages(field: str, most: int, one: object) -> None:
    check_message(GenerateRequest(**{field: [one] * most}), CONTEXT)  # type: ignore[arg-type]
    with pytest.raises(FieldError) as caught:
        check_message(GenerateRequest(**{field: [one] * (most + 1)}), CONTEXT)  # type: ignore[arg-type]
    assert caught.value.param == field


def test_of_several_fields_both_apis_name_the_same() -> None:
    message = GenerateRequest(stop_token_ids=[1] * 9, stop=["a"] * 17, logit_bias=[LogitBias()] * 301)
    document = {"stop_token_ids": [1] * 9, "stop": ["a"] * 17, "logit_bias": dict.fromkeys(range(301))}
    with pytest.raises(FieldError, match="logit_bias"):
        check_message(message, CONTEXT)
    with pytest.raises(FieldError, match="logit_bias"):
        check_document(document, CONTEXT)


def test_prompts_of_messages() -> None:
    def chat(count: int) -> GenerateRequest:
        return GenerateRequest(chat=ChatMessages(messages=[ChatMessage()] * count))

    def ids(count: int) -> GenerateRequest:
        return GenerateRequest(token_ids=TokenIds(ids=[1] * count))

    for make, param in ((chat, "messages"), (ids, "prompt")):
        check_message(make(CONTEXT), CONTEXT)
        with pytest.raises(FieldError) as caught:
            check_message(make(CONTEXT + 1), CONTEXT)
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_thresholds() -> None:
    assert max_body_bytes(131072) == 2**20 + 16 * 131072
    assert not is_large(b"{" * 512 + b"[" * 512 + b" " * (64 * 1024 - 1024))
    assert is_large(b"{" * 513 + b"[" * 512)
    assert is_large(b" " * (64 * 1024 + 1))
