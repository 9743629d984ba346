"""The types that tools' schemas give to values that are written without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.base.errors import FieldError
from services.router.tools.parameter_types import MOST_VISITS, ParameterValue, types_of_tools

SCHEMA: dict[str, Any] = {
    "$ref": "#/$defs/all",
    "$defs": {
        "all": {
            "properties": {
                "text": {"type": "string"},
                "several": {"type": ["integer", "null"]},
                "either": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/a~1b"}]},
                "one": {"const": True},
                "some": {"enum": [1, "a", None, 2.5, [], {}]},
                "list": {"items": {"type": "string"}},
                "object": {"properties": {}},
                "lost": {"$ref": "#/$defs/none"},
                "endless": {"$ref": "#/$defs/loop"},
                "deep": {"$ref": "#/$defs/deep"},
                "open": {},
                "true": True,
            }
        },
        "a/b": {"type": "array"},
        "loop": {"$ref": "#/$defs/loop"},
        "deep": {"anyOf": [{"$ref": "#/$defs/deep"}, {"type": "string"}]},
    },
}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("text", "string"),
        ("several", "integer null"),
        ("either", "number array"),
        ("one", "boolean"),
        ("some", "integer string null number array object"),
        ("list", "array"),
        ("object", "object"),
        ("lost", ""),
        ("endless", ""),
        ("deep", "string"),
        ("open", ""),
        ("true", ""),
        ("unknown", ""),
    ],
)
def test_types_of_a_parameter(name: str, types: str) -> None:
    found = types_of_tools({"f": SCHEMA, "g": {}, "h": {"properties": []}})
    assert found["f"].get(name, frozenset()) == frozenset(types.split())
    assert found["g"] == found["h"] == {}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", "integer", 5),
        (" -5\n", "integer null", -5),
        ("5.0", "integer", 5.0),
        ("5.5", "integer", "5.5"),
        ("05", "integer", "05"),
        ("1e3", "number", 1e3),
        ("NaN", "number", "NaN"),
        ("9" * 5000, "integer", "9" * 5000),
        ("True", "boolean", True),
        ("false", "boolean string", False),
        ("yes", "boolean", "yes"),
        ("1", "boolean", "1"),
        ("None", "string null", None),
        ("null", "string", "null"),
        ("null", "", "null"),
        ('{"a": [1]}', "object", {"a": [1]}),
        ('{"a": NaN}', "object", '{"a": NaN}'),
        ("[" * 100_000, "array", "[" * 100_000),
        ("[1]", "object", "[1]"),
        ("[1]", "array string", [1]),
        ("{'a': 1}", "object", "{'a': 1}"),
        ('{"a": 1}', "", {"a": 1}),
        ("[]", "", []),
        ("5", "", "5"),
        ('"a"', "string", '"a"'),
        ("", "integer", ""),
    ],
)
def test_a_text_as_json(text: str, types: str, value: object) -> None:
    for size in (1, 7, 1 << 20):
        parameter = ParameterValue(frozenset(types.split()))
        for start in range(0, len(text), size if len(text) < 10_000 else 1 << 20):
            parameter.add(text[start : start + size] if len(text) < 10_000 else text)
        read = json.loads(parameter.json())
        assert (read, type(read)) == (value, type(value))


def ring(count: int) -> dict[str, Any]:
    """A schema whose parameters lead to one another, and to themselves, in all ways."""
    parameters = [f"p{number}" for number in range(count)]
    everyone = [{"$ref": f"#/properties/{name}"} for name in parameters]
    return {"type": "object", "properties": {name: {"anyOf": everyone} for name in parameters}}


def test_schemas_that_refer_to_themselves_are_visited_once() -> None:
    alone = {"properties": {"p": {"anyOf": [{"$ref": "#/properties/p"}] * 50 + [{"type": "null"}]}}}
    assert types_of_tools({"f": alone}) == {"f": {"p": frozenset({"null"})}}
    assert set(types_of_tools({"f": ring(30)})["f"].values()) == {frozenset()}


@pytest.mark.parametrize(
    "schemas",
    [
        {"f": ring(300)},
        {f"f{number}": ring(50) for number in range(100)},
        {"f": {"properties": {f"p{number}": {"$ref": "#" + "/a" * 1000} for number in range(100)}}},
        {
            "f": {
                "properties": {f"p{number}": {"$ref": "#/one"} for number in range(1000)},
                "one": {"enum": [1] * 1000},
            }
        },
    ],
    ids=["all to all", "many tools", "long references", "long lists"],
)
def test_schemas_that_lead_to_too_many_are_refused(schemas: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"more than {MOST_VISITS} schemas"):
        types_of_tools(schemas)
