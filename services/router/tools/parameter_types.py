"""The JSON types that a tool's schema gives its parameters, and a parameter's text as JSON of these types.

Types are resolved once for each request, before its outputs are read, with a bound on the schemas that are
visited: a client may write references that lead to many others, or back to themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from baton.base.errors import FieldError
from services.router.tools.held_text import BLANK
from services.router.tools.json_scanner import JsonScanner

Types = frozenset[str]
# By the parameter's name; those that the schema does not describe are left out.
ParameterTypes = Mapping[str, Types]
STRING: Types = frozenset({"string"})
UNKNOWN: Types = frozenset()
# Schemas that the parameters of all tools of a request may lead to, each step of a reference included.
MOST_VISITS = 50_000
_LONGEST_WORD = 8
_LISTS = ("type", "enum", "anyOf", "oneOf", "allOf")


def types_of_tools(tools: Mapping[str, Mapping[str, Any]]) -> dict[str, ParameterTypes]:
    """The types of all parameters, by tool. Raises FieldError where that takes too many visits."""
    visits = _Visits()
    return {name: _Schema(schema, visits).parameters() for name, schema in tools.items()}


class _Visits:
    """Counts the schemas that are visited."""

    def __init__(self) -> None:
        self._left = MOST_VISITS

    def count(self, visits: int) -> None:
        self._left -= visits
        if self._left < 0:
            message = (
                f"tools: references and alternatives of parameters lead to more than {MOST_VISITS} schemas"
            )
            raise FieldError(message, param="tools")


class _Schema:
    """The schema of one tool's arguments."""

    def __init__(self, root: Mapping[str, Any], visits: _Visits) -> None:
        self._root = root
        self._visits = visits

    def parameters(self) -> ParameterTypes:
        properties = self._resolved(self._root).get("properties")
        if not isinstance(properties, Mapping):
            return {}
        return {name: self._types(schema) for name, schema in properties.items()}

    def _types(self, parameter: object) -> Types:
        """The types of a parameter: those of all schemas that its references and alternatives lead to, each
        visited once."""
        types: set[str] = set()
        due, seen = [parameter], set[int]()
        while due:
            schema = due.pop()
            if id(schema) in seen or not isinstance(schema, Mapping):
                continue
            seen.add(id(schema))
            self._visits.count(1 + sum(len(one) for one in map(schema.get, _LISTS) if isinstance(one, list)))
            if isinstance(reference := schema.get("$ref"), str):
                due.append(self._referred(reference))
                continue
            own = _own_types(schema)
            if own is None:
                due += _alternatives(schema)
            else:
                types |= own
        return frozenset(types)

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema that a reference within the document leads to; empty where it leads nowhere."""
        seen = set[int]()
        while isinstance(reference := schema.get("$ref"), str) and id(schema) not in seen:
            seen.add(id(schema))
            found = self._referred(reference)
            schema = found if isinstance(found, Mapping) else {}
        return {} if "$ref" in schema else schema

    def _referred(self, reference: str) -> object:
        parts = reference.removeprefix("#").split("/")[1:]
        self._visits.count(1 + len(parts))
        found: object = self._root
        for part in parts:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def _own_types(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema names itself; None where its alternatives have them."""
    match schema.get("type"):
        case str(name):
            return {name}
        case list(names):
            return {name for name in names if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    if _alternatives(schema):
        return None
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _alternatives(schema: Mapping[str, Any]) -> list[object]:
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(alternatives := schema.get(key), list):
            return alternatives
    return []


class ParameterValue:
    """A parameter's text, as it comes, and then as JSON: of one of the types where it can be read as such,
    else as a string. Where no types are known, only an object or a list is not taken as a string."""

    def __init__(self, types: Types) -> None:
        self._types = types or frozenset({"object", "array"})
        self._parts: list[str] = []
        self._is_json = True
        self._scanner = JsonScanner()
        # What the scanner has not read yet: a few characters.
        self._rest = ""

    def add(self, text: str) -> None:
        """Takes the next part of the value's text."""
        self._parts.append(text)
        self._scan(text, last=False)

    def json(self) -> str:
        """The JSON text, once all has come."""
        self._scan("", last=True)
        text = "".join(self._parts)
        value = text.strip()
        word = value.lower() if len(value) <= _LONGEST_WORD else ""
        if "null" in self._types and word in ("null", "none"):
            return "null"
        if "boolean" in self._types and word in ("true", "false"):
            return word
        if self._is_json and self._scanner.ended and self._is_one_of_the_types(value):
            return value
        return quoted(text)

    def _scan(self, text: str, *, last: bool) -> None:
        """Reads on as far as the text is JSON."""
        if not self._is_json:
            return
        text = self._rest + text
        rest = text[self._scanner.scan(text, 0, last=last) :]
        if self._scanner.ended or self._scanner.broken:
            self._is_json, self._rest = not rest.strip(BLANK), ""
        else:
            self._rest = rest

    def _is_one_of_the_types(self, value: str) -> bool:
        match value[0]:
            case "{":
                return "object" in self._types
            case "[":
                return "array" in self._types
            case first if first in "-0123456789":
                number = float(value)
                return "number" in self._types or ("integer" in self._types and _is_whole(value, number))
            case _:
                return False


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _is_whole(value: str, number: float) -> bool:
    return value.lstrip("-").isdigit() or (math.isfinite(number) and number == int(number))


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
