"""Fields that constrain an output, and the constraints they mean."""

from __future__ import annotations

from typing import Any

import pytest

from baton.base.errors import FieldError
from baton.v1.types_pb2 import Choices, Grammar
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.responses.body import ResponsesBody
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits, check_fields

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TEXT = '{"type": "object", "properties": {"ä": {"type": "integer"}}}'
OBJECT = Grammar(json_schema='{"type":"object"}')


def parse(**fields: Any) -> tuple[Grammar | None, str]:
    (parsed,) = CompletionBody.parse({"model": "m", "prompt": "p", **fields}).parsed_requests()
    return parsed.grammar, parsed.api_name("grammar")


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Grammar(json_schema=TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(json_schema=TEXT)),
        ({"structured_outputs": {"json": TEXT, "regex": None}}, Grammar(json_schema=TEXT)),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar(choice=Choices(choices=["a", "b"]))),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar(grammar="start: /a/")),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}},
            Grammar(json_schema=TEXT, whitespace_pattern=""),
        ),
        ({"guided_json": SCHEMA}, Grammar(json_schema=TEXT)),
        ({"guided_regex": "a+"}, Grammar(regex="a+")),
        ({"guided_choice": ["a"]}, Grammar(choice=Choices(choices=["a"]))),
        ({"guided_grammar": "start: /a/"}, Grammar(grammar="start: /a/")),
    ],
)
def test_every_field_that_constrains(fields: dict[str, Any], grammar: Grammar) -> None:
    assert parse(**fields) == (grammar, next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "grammar", "asking"),
    [
        ({"text": {"format": {"type": "json_object"}}}, OBJECT, "text"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}}},
            Grammar(json_schema=TEXT),
            "text",
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(regex="a+"), "structured_outputs"),
        ({"text": {"format": {"type": "text"}}}, None, "grammar"),
        ({"text": {}}, None, "grammar"),
    ],
)
def test_fields_of_the_responses_api(fields: dict[str, Any], grammar: Grammar | None, asking: str) -> None:
    parsed = ResponsesBody.parse({"model": "m", "input": "p", **fields}).parsed_request()
    assert (parsed.grammar, parsed.api_name("grammar")) == (grammar, asking)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_what_constrains_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == (None, "grammar")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "cannot be combined"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "only one of json, regex"),
        ({"structured_outputs": {"json": 5}}, "must be a JSON schema"),
        ({"structured_outputs": {"json_object": 1}}, "true or false"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "a list of strings"),
        ({"structured_outputs": {"grammar": 5}}, "must be a string"),
        ({"structured_outputs": {"regex": "\ud800"}}, "valid Unicode"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": 5}}, "must be a string"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(FieldError, match=reason):
        parse(**fields)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(regex="a" * (128 * 1024)), "131076 bytes; at most 131072"),
        (Grammar(), "is empty"),
        (Grammar(choice=Choices()), "is empty"),
    ],
)
def test_sizes_are_checked_before_anything_is_compiled(grammar: Grammar, reason: str) -> None:
    parsed = ParsedRequest(model="m", text="a", grammar=grammar)
    with pytest.raises(FieldError, match=reason):
        check_fields(parsed, RequestLimits("m", (2,), 100, 100))
