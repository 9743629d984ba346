"""Reads the grammar that an output must match from the bodies of both APIs: OpenAI's `response_format`,
vLLM's `structured_outputs` and its older `guided_*` fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from baton.base.errors import FieldError
from baton.v1.types_pb2 import Choices, Grammar
from services.router.formats.json_bodies import parse_text

# The schema of any JSON object.
ANY_OBJECT = '{"type":"object"}'
_NEUTRAL_FORMAT = "text"

# The fields of `structured_outputs`, and the older fields that mean the same.
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_WHITESPACE = "whitespace_pattern"


def grammar_of(
    response_format: dict[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    guided: Mapping[str, object],
) -> tuple[Grammar | None, str]:
    """The grammar that a body's fields ask for, and the field that does. `guided`: the older fields without
    their prefix. Raises FieldError where a field is invalid, or several ask for one."""
    older = next((name for name in _KINDS if guided.get(name) is not None), "")
    if response_format is None and structured_outputs is None and not older:
        return None, "grammar"
    found = {
        "response_format": _of_response_format(response_format),
        "structured_outputs": _of_settings("structured_outputs", structured_outputs or {}),
        f"guided_{older}": _of_settings("guided", guided),
    }
    asking = [(grammar, field) for field, grammar in found.items() if grammar is not None]
    if len(asking) > 1:
        fields = " and ".join(field for _, field in asking)
        raise FieldError(f"{fields} cannot be combined", param=asking[1][1])
    return asking[0] if asking else (None, "grammar")


def grammar_of_text_format(given: Mapping[str, object] | None) -> Grammar | None:
    """The grammar of `text.format` of the Responses API; None for plain text. FieldError if it is invalid."""
    kind = None if given is None else given.get("type")
    if given is None or kind == _NEUTRAL_FORMAT:
        return None
    if kind == "json_object":
        return Grammar(json_schema=ANY_OBJECT)
    if kind != "json_schema":
        raise FieldError("text.format.type must be text, json_object or json_schema", param="text")
    return _json_schema("text.format.schema", given.get("schema"))


def _of_response_format(given: dict[str, Any] | None) -> Grammar | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == _NEUTRAL_FORMAT:
        return None
    if kind == "json_object":
        return Grammar(json_schema=ANY_OBJECT)
    if kind != "json_schema":
        raise FieldError(
            "response_format.type must be text, json_object or json_schema", param="response_format"
        )
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise FieldError("response_format.json_schema must be an object", param="response_format")
    return _json_schema("response_format.json_schema.schema", described.get("schema") or {"type": "object"})


def _of_settings(field: str, settings: Mapping[str, object]) -> Grammar | None:
    """`field`: its name in errors."""
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    whitespace = given.pop(_WHITESPACE, None)
    unknown = [name for name in given if name not in _KINDS]
    if unknown:
        name = unknown[0][:64]
        raise FieldError(f"{field}.{name} is not supported", param=field, code="unsupported_parameter")
    if not given:
        return None
    if len(given) > 1:
        raise FieldError(f"{field}: only one of {', '.join(sorted(given))} may be set", param=field)
    ((name, value),) = given.items()
    grammar = _MAKERS[name](f"{field}.{name}", value)
    if whitespace is not None:
        if not isinstance(whitespace, str):
            raise FieldError(f"{field}.{_WHITESPACE} must be a string", param=field)
        grammar.whitespace_pattern = whitespace
    return grammar


def _json_schema(name: str, value: object) -> Grammar:
    """A schema as an object, or as its JSON text."""
    if isinstance(value, str):
        try:
            value = parse_text(value)
        except (ValueError, RecursionError):
            raise FieldError(f"{name} is not JSON", param=_param(name)) from None
    if not isinstance(value, dict | bool):
        raise FieldError(f"{name} must be a JSON schema", param=_param(name))
    return Grammar(json_schema=json.dumps(value, ensure_ascii=False))


def _json_object(name: str, value: object) -> Grammar:
    if value is not True:
        raise FieldError(f"{name} must be true or false", param=_param(name))
    return Grammar(json_schema=ANY_OBJECT)


def _regex(name: str, value: object) -> Grammar:
    return Grammar(regex=_text(name, value))


def _choice(name: str, value: object) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise FieldError(f"{name} must be a list of strings", param=_param(name))
    return Grammar(choice=Choices(choices=[_text(name, one) for one in value]))


def _lark(name: str, value: object) -> Grammar:
    return Grammar(grammar=_text(name, value))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise FieldError(f"{name} must be a string", param=_param(name))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError(f"{name} is not valid Unicode", param=_param(name)) from None
    return value


def _param(name: str) -> str:
    return name.partition(".")[0]


_MAKERS: dict[str, Callable[[str, object], Grammar]] = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}
