"""The page at /docs: endpoints and fields of the OpenAPI document as one HTML page, without any script."""

from __future__ import annotations

import functools
import json
from html import escape
from typing import Any

from services.router.api.openapi import openapi_document

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem }
h2 { margin-top: 2.5rem } code { font-size: 0.9em; overflow-wrap: anywhere }
.method { text-transform: uppercase; font-weight: 600; margin-right: 0.5em }
table { border-collapse: collapse; width: 100%; table-layout: fixed }
th:first-child { width: min(45%, 18rem) }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0 }
th, td { border-bottom: 1px solid #8884 }
"""


@functools.cache
def docs_page() -> str:
    """Returns the HTML text of the page."""
    document = openapi_document()
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    contents = "".join(
        f'<li><a href="#{operation["operationId"]}"><code>{escape(path)}</code></a> '
        f"{escape(operation['summary'])}</li>"
        for path, _, operation in operations
    )
    sections = "".join(_section(document, *operation) for operation in operations)
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: HTTP API</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}: HTTP API</h1><p>{escape(document['info']['summary'])}. "
        'For programs: the <a href="openapi.json">OpenAPI document</a>.</p>'
        f"<ul>{contents}</ul>{sections}</body></html>"
    )


def _section(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    fields = _fields(document, body["content"]["application/json"]["schema"]) if body else ""
    responses = "".join(
        f"<tr><td>{status}</td><td>{escape(response['description'])}</td></tr>"
        for status, response in operation["responses"].items()
    )
    return (
        f'<h2 id="{operation["operationId"]}"><span class="method">{method}</span>'
        f"<code>{escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>{fields}"
        f"<table><tr><th>status</th><th>when</th></tr>{responses}</table>"
    )


def _fields(document: dict[str, Any], reference: dict[str, str]) -> str:
    """The table of a body's fields, those that are required first."""
    schema = document["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
    required = schema.get("required", [])
    properties = sorted(schema["properties"].items(), key=lambda item: (item[0] not in required, item[0]))
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td>"
        f"<td>{'required, ' if name in required else ''}{escape(_notes(field))}</td></tr>"
        for name, field in properties
    )
    return f"<table><tr><th>field</th><th>values</th></tr>{rows}</table><p></p>"


def _types(field: dict[str, Any]) -> list[dict[str, Any]]:
    """The types that a field may have, null aside."""
    return [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]


def _type(field: dict[str, Any]) -> str:
    names = [one.get("type") or one.get("$ref", "").rpartition("/")[2] for one in _types(field)]
    return " or ".join(filter(None, names))


def _notes(field: dict[str, Any]) -> str:
    """Types, bounds and default, and the description."""
    words = [_type(field)] if _type(field) else []
    words += [text.format(one[key]) for one in _types(field) for key, text in _BOUNDS.items() if key in one]
    if "default" in field:
        words.append(f"default {json.dumps(field['default'])}")
    return ". ".join(part for part in (", ".join(words), field.get("description", "")) if part)


_BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} keys",
    "maxLength": "at most {} characters",
}
