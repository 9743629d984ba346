"""JSON schemas of request bodies, made of what validates them: models, bounds and the table of fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from services.router.formats.field_table import Treatment
from services.router.formats.openai.fields import Body
from services.router.request.bounds import (
    LENGTHS,
    MAX_MODEL_CHARS,
    MAX_STOP_STRING_CHARS,
    NUMBERS,
    Bounds,
)
from services.router.request.sizes import MAX_PROMPTS

Schema = dict[str, Any]
# Fields whose bounds are those of a field with another name.
_BOUNDS_OF = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "best_of": "n",
}
_CHARS = {"model": MAX_MODEL_CHARS, "stop": MAX_STOP_STRING_CHARS}
REFERENCES = "#/components/schemas/"
# By whether the bound itself is excluded.
_LEAST = {False: "minimum", True: "exclusiveMinimum"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PARTS: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
_CONTENT: Schema = {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]}
# Fields that are checked by hand, for better messages than pydantic's: by model and name.
_BY_HAND: dict[tuple[str, str], Schema] = {
    ("CompletionBody", "prompt"): {
        "anyOf": [
            _TEXT,
            _IDS,
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT},
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
        ]
    },
    ("DetokenizeBody", "tokens"): {**_IDS, "minItems": 0},
    ("MessageBody", "content"): _CONTENT,
    ("InputItem", "content"): _CONTENT,
}
# Lists that may not be empty, by model and name.
_NOT_EMPTY = (("ChatBody", "messages"), ("ChatBody", "guided_choice"), ("CompletionBody", "guided_choice"))


def body_schema(body: type[Body]) -> tuple[Schema, dict[str, Schema]]:
    """The schema of a body, and those of the objects in it by name. Refused fields are left out; fields
    without effect may have any value."""
    schema = _untitled(body.model_json_schema(ref_template=REFERENCES + "{model}"))
    parts: dict[str, Schema] = schema.pop("$defs", {})
    for model, properties in ((body.__name__, schema["properties"]), *_properties(parts)):
        properties |= {name: _BY_HAND[model, name] for name in properties if (model, name) in _BY_HAND}
    for name, field in schema["properties"].items():
        if (body.__name__, name) in _NOT_EMPTY:
            for one in field.get("anyOf", [field]):
                one |= {"minItems": 1} if one["type"] == "array" else {}
        _bound(name, field)
        if _BOUNDS_OF.get(name, name) == "max_tokens" and "echo" not in schema["properties"]:
            field["anyOf"][0]["minimum"] = 1  # a prompt alone may be run without output
    no_effect = (name for name, field in body.table.items() if field.treatment is Treatment.NO_EFFECT)
    schema["properties"] |= {name: {"description": "accepted, no effect"} for name in sorted(no_effect)}
    schema.pop("additionalProperties", None)
    return schema, parts


def _properties(parts: dict[str, Schema]) -> Iterator[tuple[str, dict[str, Schema]]]:
    return ((name, part["properties"]) for name, part in parts.items() if "properties" in part)


def _untitled(schema: Schema) -> Schema:
    """Without the titles and null defaults that pydantic writes."""
    kept = {
        key: value
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None)
    }
    for key, value in kept.items():
        if isinstance(value, dict):
            kept[key] = _untitled(value)
        elif isinstance(value, list):
            kept[key] = [_untitled(item) if isinstance(item, dict) else item for item in value]
    return kept


def _bound(name: str, field: Schema) -> None:
    """Adds the bounds of a field to each type that it may have."""
    bounds, most = NUMBERS.get(_BOUNDS_OF.get(name, name)), LENGTHS.get(name)
    for one in field.get("anyOf", [field]):
        match one.get("type"):
            case "integer" | "number" if bounds is not None:
                one |= _numeric(bounds)
            case "string" if name in _CHARS:
                one["maxLength"] = _CHARS[name]
            case "array" if most is not None:
                one["maxItems"] = most
                if name in _CHARS:
                    one["items"] |= {"minLength": 1, "maxLength": _CHARS[name]}
            case "object" if most is not None:
                one["maxProperties"] = most
                if bounds is not None:
                    one["additionalProperties"] |= _numeric(bounds)
    if bounds is not None and bounds.default is not None and name in NUMBERS and name not in LENGTHS:
        field["default"] = bounds.default


def _numeric(bounds: Bounds) -> Schema:
    least = {_LEAST[bounds.above]: bounds.least} if bounds.least > -math.inf else {}
    return {**least, "maximum": bounds.most} if bounds.most < math.inf else least
