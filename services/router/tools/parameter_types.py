"""The type that a tool's JSON schema gives a parameter, and a parameter's text as JSON of this type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
# How deep references and alternatives are followed.
_MOST_DEPTH = 8


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that the parameter may have; none where the schema does not say."""
    properties = _resolved(schema, schema).get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(own, schema, 0)


def json_text(text: str, types: frozenset[str]) -> str:
    """The text as JSON: of one of the types where it can be read as such, else as a string. Where no types
    are known, only an object or a list is not taken as a string."""
    word = text.strip().lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
    if value is not text and _is_one_of(value, types or frozenset({"object", "array"})):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)


def _is_one_of(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, int) or (math.isfinite(value) and value == int(value))
        return "number" in types or ("integer" in types and whole)
    return (isinstance(value, dict) and "object" in types) or (isinstance(value, list) and "array" in types)


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return frozenset()
    schema = _resolved(schema, root)
    match schema.get("type"):
        case str(name):
            return frozenset({name})
        case list(names):
            return frozenset(name for name in names if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(alternatives := schema.get(key), list):
            return frozenset().union(*(_types(one, root, depth + 1) for one in alternatives))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference within the document leads to; empty where it leads nowhere."""
    for _ in range(_MOST_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: object = root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = found
    return {}


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
