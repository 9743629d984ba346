"""JSON schemas of request bodies, made of what validates them: models, bounds and the table of fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from baton.request_fields.field import Bounds, Treatment
from baton.request_fields.table import BY_NAME
from services.router.formats.openai.fields import Body
from services.router.request.sizes import MAX_PROMPTS

Schema = dict[str, Any]
REFERENCES = "#/components/schemas/"
_MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
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
    ("PredictionBody", "content"): {"anyOf": [{"type": "string"}, _PARTS]},
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
        _describe(name, field)
        if name in _MOST_TOKENS and "echo" not in schema["properties"]:
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


def _describe(name: str, field: Schema) -> None:
    """Adds a field's meaning and default, and its bounds to each type that it may have."""
    row = BY_NAME[name]
    for one in field.get("anyOf", [field]):
        match one.get("type"):
            case "integer" | "number" if row.bounds is not None:
                one |= _numeric(row.bounds)
            case "string" if row.most_chars is not None:
                one["maxLength"] = row.most_chars
            case "array" if row.most_items is not None:
                one["maxItems"] = row.most_items
                if row.most_chars is not None:
                    one["items"] |= {"minLength": 1, "maxLength": row.most_chars}
            case "object" if row.most_items is not None:
                one["maxProperties"] = row.most_items
                if row.bounds is not None:
                    one["additionalProperties"] |= _numeric(row.bounds)
    if row.default is not None:
        field["default"] = row.default
    field["description"] = row.meaning


def _numeric(bounds: Bounds) -> Schema:
    least = {_LEAST[bounds.above]: bounds.least} if bounds.least > -math.inf else {}
    return {**least, "maximum": bounds.most} if bounds.most < math.inf else least
