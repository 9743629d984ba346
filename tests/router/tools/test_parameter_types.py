"""The types that tools' schemas give to values that are written without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.tools.parameter_types import json_text, types_of

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
    assert types_of(SCHEMA, name) == frozenset(types.split())
    assert types_of({}, name) == types_of({"properties": []}, name) == frozenset()


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
    read = json.loads(json_text(text, frozenset(types.split())))
    assert (read, type(read)) == (value, type(value))
