"""Texts and JSON schemas as llguidance reads them: literals of its Lark syntax, and schemas in which
annotations constrain nothing. Imported by `services.grammar`, which compiles grammars, and by the router,
which writes those of tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# The values of `format` that llguidance can enforce. JSON Schema makes `format` an annotation: a value that
# is not known constrains nothing.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
# The dialects that llguidance knows; a schema of another dialect is read as one of the newest.
_DIALECTS = (
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
)
# Keywords that llguidance refuses even at values that constrain nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
_ANNOTATIONS = ("format", "$schema", *_NEUTRAL)
# Keywords whose values are data, in which no key is a keyword.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
# Keywords whose values map names to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def literal(text: str) -> str:
    """A string of Lark that matches exactly this text. JSON's escapes, and U+007F, which JSON leaves as it is
    and Lark's lexer refuses."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema's JSON, without the annotations that llguidance takes for constraints it does not know."""
    return without_annotations(json.dumps(schema))


def without_annotations(text: str) -> str:
    """The same for a schema's JSON text; text that is no JSON is returned as it is."""
    if "\\" not in text and not any(f'"{name}"' in text for name in _ANNOTATIONS):
        return text
    try:
        schema = json.loads(text)
        return json.dumps(schema, ensure_ascii=False) if _drop_annotations(schema) else text
    except (ValueError, RecursionError):
        return text


def _drop_annotations(schema: object) -> bool:
    """Removes them in place and says whether there were any. Visits each value once."""
    dropped, unvisited = False, [(schema, False)]
    while unvisited:
        value, names = unvisited.pop()
        if isinstance(value, list):
            unvisited += [(item, False) for item in value]
        elif isinstance(value, dict):
            annotations = [] if names else [key for key in _ANNOTATIONS if _constrains_nothing(key, value)]
            for key in annotations:
                del value[key]
            dropped = dropped or bool(annotations)
            unvisited += [
                (item, not names and key in _NAMED)
                for key, item in value.items()
                if names or key not in _DATA
            ]
    return dropped


def _constrains_nothing(key: str, schema: Mapping[str, Any]) -> bool:
    """True if the schema has the keyword, at a value that constrains nothing."""
    if key not in schema:
        return False
    value = schema[key]
    if key == "format":
        return value is None or (isinstance(value, str) and value not in FORMATS)
    if key == "$schema":
        return isinstance(value, str) and value.removesuffix("#") not in _DIALECTS
    return any(value == one and type(value) is type(one) for one in _NEUTRAL[key])
