"""The OpenAPI document of the public HTTP API."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.router.api.answer_schemas import ANSWERS
from services.router.api.stored_responses import DEFAULT_ITEMS, MOST_ITEMS
from services.router.formats.openai.body_schemas import REFERENCES, Schema, body_schema
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import Body
from services.router.formats.openai.tokenize_bodies import DetokenizeBody, TokenizeBody
from services.router.formats.responses.body import ResponsesBody

_JSON = "application/json"
_EVENTS = "text/event-stream"
_RETRY_AFTER = {"required": True, "schema": {"type": "integer", "minimum": 1}, "description": "seconds"}
_PATH_PART: Schema = {"type": "string", "minLength": 1}
# Status → when a request is answered with it.
_ERRORS: Mapping[str, str] = {
    "400": "a header, the path or a field is invalid, or not supported",
    "401": "no valid API key",
    "403": "this Host is not served here, or the key's scopes or models do not allow it",
    "404": "an unknown model, or no stored response with this id",
    "413": "the body is too large",
    "415": "the body is not declared as JSON",
    "429": "a limit of requests is exceeded; Retry-After says when to try again",
    "503": "no worker, or a full queue; Retry-After says when to try again",
    "504": "the request did not end in time",
}


@dataclass(frozen=True)
class Operation:
    """One method of one path. `answer`: a schema of `ANSWERS`; `stream`: that of its server-sent events."""

    method: str
    path: str
    name: str
    summary: str
    answer: str
    body: type[Body] | None = None
    stream: str | None = None
    errors: Sequence[str] = ("401",)
    query: Mapping[str, Schema] = field(default_factory=dict)
    # Operations on what the answer's `id` names.
    links: Sequence[str] = ()


# What `http/guard.py` and the check of keys, which stand before the operations, answer to any of them.
_ANY_ERRORS = ("400", "403")
_POST_ERRORS = ("401", "404", "413", "415", "429", "503", "504")
_STORED_ERRORS = ("401", "404", "429", "503")
_CONVERSION_ERRORS = ("401", "404", "413", "415", "503")

OPERATIONS = (
    Operation(
        *("post", "/v1/chat/completions", "createChatCompletion", "Continues a conversation"),
        answer="ChatCompletion",
        body=ChatBody,
        stream="ChatCompletionChunk",
        errors=_POST_ERRORS,
    ),
    Operation(
        *("post", "/v1/completions", "createCompletion", "Continues texts or token ids"),
        answer="Completion",
        body=CompletionBody,
        stream="Completion",
        errors=_POST_ERRORS,
    ),
    Operation(
        *("post", "/v1/responses", "createResponse", "Responds to a text or a conversation"),
        answer="Response",
        body=ResponsesBody,
        stream="ResponseEvent",
        errors=_POST_ERRORS,
        links=("getResponse", "deleteResponse", "listInputItems"),
    ),
    Operation(
        *("get", "/v1/responses/{response_id}", "getResponse", "A stored response, without logprobs"),
        answer="Response",
        errors=_STORED_ERRORS,
        query={"stream": {"enum": ["false"]}},
    ),
    Operation(
        *("delete", "/v1/responses/{response_id}", "deleteResponse", "Deletes a stored response"),
        answer="DeletedResponse",
        errors=_STORED_ERRORS,
    ),
    Operation(
        *("get", "/v1/responses/{response_id}/input_items", "listInputItems"),
        summary="The items that a stored response was given, those of earlier turns included",
        answer="ResponseItems",
        errors=_STORED_ERRORS,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": DEFAULT_ITEMS},
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string"},
        },
    ),
    Operation("get", "/v1/models", "listModels", "The served model", "ModelList"),
    Operation("get", "/v1/models/{model}", "getModel", "One model", "Model", errors=("401", "404")),
    Operation(
        *(
            "post",
            "/tokenize",
            "tokenize",
            "The token ids of a text or a conversation",
            "Tokens",
            TokenizeBody,
        ),
        errors=_CONVERSION_ERRORS,
    ),
    Operation(
        *("post", "/detokenize", "detokenize", "The text of token ids", "Text", DetokenizeBody),
        errors=_CONVERSION_ERRORS,
    ),
    Operation("get", "/health", "health", "Liveness: whether the router answers", "State", errors=()),
    Operation(
        "get", "/ready", "ready", "Readiness: whether a request would be served", "State", errors=("503",)
    ),
    Operation("get", "/version", "version", "The version of Baton", "Version", errors=()),
)


def installed_version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a bare checkout
        return "unknown"


@functools.cache
def openapi_document() -> dict[str, Any]:
    """The document, in version 3.1 of OpenAPI. All callers share it and must not change it."""
    schemas: dict[str, Schema] = dict(ANSWERS)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": installed_version(),
            "summary": "OpenAI-compatible completions by separate prefill and decode workers",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, schemas: dict[str, Schema]) -> dict[str, Any]:
    """OpenAPI's object for the operation; adds its body's schemas to `schemas`."""
    names = re.findall(r"{(\w+)}", operation.path)
    content = {_JSON: _reference(operation.answer)}
    if operation.stream is not None:
        content[_EVENTS] = {"schema": _event(operation.stream)}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{status: _error(operation, status) for status in sorted({*_ANY_ERRORS, *operation.errors})},
        },
    }
    if operation.links:
        given = {"response_id": "$response.body#/id"}
        links = {name: {"operationId": name, "parameters": given} for name in operation.links}
        described["responses"]["200"]["links"] = links
    if not operation.errors or operation.path == "/ready":
        described["security"] = []
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": _PATH_PART} for name in names),
        *({"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()),
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema, parts = body_schema(operation.body)
        schemas |= {operation.body.__name__: schema, **parts}
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: _reference(operation.body.__name__)},
        }
    return described


def _error(operation: Operation, status: str) -> dict[str, Any]:
    schema = "State" if (operation.path, status) == ("/ready", "503") else "Error"
    described: dict[str, Any] = {"description": _ERRORS[status], "content": {_JSON: _reference(schema)}}
    if status in ("429", "503") and schema == "Error":
        described["headers"] = {"Retry-After": _RETRY_AFTER}
    return described


def _event(name: str) -> Schema:
    """One server-sent event. Its data is a JSON text, or `[DONE]` at the end of completions and chats."""
    data = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"$ref": REFERENCES + name},
    }
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _reference(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": REFERENCES + name}}
