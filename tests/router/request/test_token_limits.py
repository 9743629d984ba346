"""Limits of an output's length, given the prompt and the model's context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.base.errors import ErrorKind, FieldError
from services.router.request import validate
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits

CONTEXT, U32, I64 = 100, 2**32 - 1, 2**63 - 1
PARSED = ParsedRequest(model="fake", text="a")
# The API's names of fields.
NAMES = {"prompt": "messages", "max_tokens": "max_completion_tokens"}


def limits_of(parsed: ParsedRequest, prompt: int) -> validate.OutputLimits:
    limits = RequestLimits("fake", (), 10, CONTEXT)
    return validate.check_prompt(parsed, validate.check_fields(parsed, limits), [1] * prompt, limits)


def parts_of(error: FieldError) -> tuple[str | None, str, str | None, ErrorKind]:
    return error.param, error.message, error.code, error.kind


# What is asked for, the prompt's length, the output's limit.
LIMITS: list[tuple[dict[str, Any], int, int]] = [
    ({}, 1, 16),
    ({}, 90, 10),
    ({"fills_context": True}, 1, 99),
    ({"max_tokens": 1}, 99, 1),
    ({"max_tokens": 2}, 99, 1),
    ({"max_tokens": U32}, 1, 99),
    ({"max_tokens": 7, "fills_context": True}, 1, 7),
    ({"max_tokens": 2**63 - 1}, 1, 99),
    ({"max_tokens": 0}, 1, 0),
    ({"max_tokens": 0, "echo": True}, 1, 0),
    ({"max_tokens": 0, "echo": True}, 100, 0),
]


@pytest.mark.parametrize(("fields", "prompt", "limit"), LIMITS)
def test_max_tokens_are_limited_by_the_context(fields: dict[str, Any], prompt: int, limit: int) -> None:
    assert limits_of(replace(PARSED, **fields), prompt).max_tokens == limit


TOO_LONG = (
    "the prompt has {} tokens; with at least one of output it must fit the model's context of 100 tokens"
)
NO_OUTPUT: list[tuple[dict[str, Any], int, str, str, str | None]] = [
    ({}, 0, "prompt", "the prompt is empty", None),
    ({}, 100, "prompt", TOO_LONG.format(100), "context_length_exceeded"),
    ({"max_tokens": 0, "echo": True}, 101, "prompt", TOO_LONG.format(101), "context_length_exceeded"),
    ({"max_tokens": 0, "structured": True}, 1, "max_tokens", "max_tokens must be at least 1", None),
    ({"max_tokens": -1, "echo": True}, 1, "max_tokens", f"max_tokens must be from 0 to {I64}", None),
    ({"max_tokens": 2**63}, 1, "max_tokens", f"max_tokens must be from 0 to {I64}", None),
]


@pytest.mark.parametrize(("fields", "prompt", "param", "message", "code"), NO_OUTPUT)
@pytest.mark.parametrize("api_names", [{}, NAMES], ids=["ours", "renamed"])
def test_a_prompt_or_limit_that_leaves_no_output_is_refused(
    fields: dict[str, Any], prompt: int, param: str, message: str, code: str | None, api_names: dict[str, str]
) -> None:
    with pytest.raises(FieldError) as caught:
        limits_of(replace(PARSED, **fields, api_names=api_names), prompt)
    name = api_names.get(param, param)
    expected = name, message.replace(param + " must", name + " must")
    assert parts_of(caught.value) == (*expected, code, ErrorKind.INVALID)


# The request's fields, the prompt's length, the number of tokens before which nothing stops the output.
LEAST_TOKENS: list[tuple[dict[str, Any], int, int]] = [
    ({}, 90, 0),
    ({"min_tokens": 0}, 90, 0),
    ({"min_tokens": 16}, 84, 16),
    ({"min_tokens": 16}, 90, 10),
    ({"min_tokens": 7, "max_tokens": 7}, 1, 7),
    ({"min_tokens": U32, "fills_context": True}, 1, 99),
]


@pytest.mark.parametrize(("fields", "prompt", "least"), LEAST_TOKENS)
def test_min_tokens_are_at_most_the_limit(fields: dict[str, Any], prompt: int, least: int) -> None:
    assert limits_of(replace(PARSED, **fields), prompt).min_tokens == least


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 17}, "min_tokens must not exceed max_completion_tokens, which is 16"),
        ({"min_tokens": 8, "max_tokens": 7}, "min_tokens must not exceed max_completion_tokens, which is 7"),
        (
            {"min_tokens": 2**32, "fills_context": True},
            f"min_tokens must not exceed max_completion_tokens, which is {U32}",
        ),
        ({"min_tokens": -1}, f"min_tokens must be from 0 to {I64}"),
    ],
)
def test_min_tokens_above_max_tokens_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        limits_of(replace(PARSED, **fields, api_names=NAMES), 1)
    assert parts_of(caught.value) == ("min_tokens", message, None, ErrorKind.INVALID)
