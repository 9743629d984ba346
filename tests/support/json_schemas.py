"""Random JSON schemas of bounded size: every document that one allows is short."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

_NAMES = ("id", "name", "tags", "größe", "a b", 'quote"', "$x", "on", "value", "next", "kind", "at")
_PATTERNS = ("^[a-f]{2,6}$", "^(yes|no)$", "^[A-Z][a-z]{0,5}$", "^\\d{3}-\\d{2}$", "^x+y{1,3}$|^z$")
_FORMATS = ("date", "uuid", "ipv4")
_DEEPEST = 3

_formats = FormatChecker()


@_formats.checks("date", raises=ValueError)  # type: ignore[untyped-decorator]
def _is_date(text: object) -> bool:
    """RFC 3339 has a year 0000, a leap year, which Python's dates do not."""
    year_0 = isinstance(text, str) and text.startswith("0000-")
    return not isinstance(text, str) or bool(date.fromisoformat(f"2000{text[4:]}" if year_0 else text))


def schemas(count: int, seed: int) -> list[Schema]:
    """`count` schemas, most of them objects, of all the constructs below."""
    draw = random.Random(seed)
    found: list[Schema] = []
    while len(found) < count:
        kind = _MAKERS[len(found) % len(_MAKERS)]
        found.append(kind(draw, 0))
    return found


def validator_of(schema: Schema) -> Draft202012Validator:
    """Checks documents against a schema, formats included."""
    return Draft202012Validator(schema, format_checker=_formats)


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-1000, 1000)
    bounds: Schema = {"minimum": low, "maximum": low + draw.choice((0, 1, 9, 250, 99_999))}
    if draw.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + draw.choice((2, 30))}
    return {"type": "integer", **bounds}


def _multiple(draw: random.Random, depth: int) -> Schema:
    step = draw.choice((3, 7, 10))
    return {"type": "integer", "minimum": 0, "maximum": step * draw.randint(1, 40), "multipleOf": step}


def _number(draw: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": draw.randint(1, 100), "multipleOf": 0.25}


def _string(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 8)}


def _pattern(draw: random.Random, depth: int) -> Schema:
    pattern = draw.choice(_PATTERNS)
    if "+" in pattern:
        return {"type": "string", "pattern": pattern, "maxLength": 12}
    return {"type": "string", "pattern": pattern}


def _format(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": draw.choice(_FORMATS)}


def _enum(draw: random.Random, depth: int) -> Schema:
    values: list[Any] = [
        "red",
        "größer",
        'a "b"\n\t\\',
        "日本語",
        "",
        7,
        -3.5,
        True,
        None,
        [1, "x"],
        {"k": [2]},
    ]
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _const(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice(["x", 5, False, None, {"a": [1, 2]}])}


def _plain(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(("boolean", "null"))}


def _several_types(draw: random.Random, depth: int) -> Schema:
    return {"type": ["boolean", "null", "string"], "maxLength": draw.randint(0, 5)}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _one_of(draw: random.Random, depth: int) -> Schema:
    branches = [_integer(draw, depth), _string(draw, depth), {"type": "boolean"}]
    return {"oneOf": draw.sample(branches, draw.randint(2, 3))}


def _all_of(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 50)
    return {
        "allOf": [{"type": "integer", "minimum": least}, {"maximum": least + draw.randint(0, 500)}],
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    members = [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": members, "items": False, "minItems": len(members)}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_NAMES, draw.randint(2, 5))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.8],
        "additionalProperties": False,
    }


def _references(draw: random.Random, depth: int) -> Schema:
    """A shared definition, used twice; and at the root a linked list of bounded length."""
    point = {
        "type": "object",
        "properties": {"x": _integer(draw, depth), "y": _integer(draw, depth)},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    if depth:
        return point
    return {
        "$defs": {"point": point},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    }


_LEAVES: tuple[Callable[[random.Random, int], Schema], ...] = (
    _integer,
    _multiple,
    _number,
    _string,
    _pattern,
    _format,
    _enum,
    _const,
    _plain,
    _several_types,
    _one_of,
    _all_of,
)
_MAKERS = (_object, _array, _object, _tuple, _object, _any_of, _references, *_LEAVES)


def _any(draw: random.Random, depth: int) -> Schema:
    makers = _LEAVES if depth >= _DEEPEST or draw.random() < 0.5 else _MAKERS
    return draw.choice(makers)(draw, depth)
