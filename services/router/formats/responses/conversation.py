"""Conversations that are stored with responses: their items as the API lists them, and as a request continues
them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from baton.base.errors import FieldError
from services.router.formats.responses.body import InputItem, ResponsesBody
from services.router.formats.responses.items import Document
from services.router.request.sizes import check_message_count

# Most items of a stored conversation, which are parsed on the event loop.
MAX_STORED_ITEMS = 1024
_ITEMS = TypeAdapter(list[InputItem])
_PREFIXES: Mapping[str, str] = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def check_storage(body: ResponsesBody, *, enabled: bool) -> None:
    """Raises FieldError where a body continues a response and the router stores none."""
    if body.previous_response_id is not None and not enabled:
        raise FieldError(
            "previous_response_id is not supported: this router stores no responses",
            param="previous_response_id",
            code="unsupported_parameter",
        )


def continued(body: ResponsesBody, earlier: bytes, context: int) -> ResponsesBody:
    """The body, whose input begins with the items of an earlier response. `context`: in tokens."""
    items = [*_ITEMS.validate_json(earlier), *_input_items(body)]
    parts = sum(len(item.content) for item in items if isinstance(item.content, list))
    check_message_count("input", max(len(items), parts), context)
    return body.model_copy(update={"input": items})


def stored_items(body: ResponsesBody) -> list[Document]:
    """The input of a valid body, each item with an id. FieldError if it has too many to be stored."""
    token, items = secrets.token_hex(12), _input_items(body)
    if len(items) > MAX_STORED_ITEMS:
        raise FieldError(
            f"a stored conversation has at most {MAX_STORED_ITEMS} items, this one {len(items)}: send "
            "`store: false`",
            param="store",
            code="response_too_large",
        )
    return [_stored(item, f"{token}_{number}") for number, item in enumerate(items)]


def _input_items(body: ResponsesBody) -> list[InputItem]:
    if isinstance(body.input, str):
        return [InputItem(role="user", content=body.input)] if body.input else []
    return body.input


def _stored(item: InputItem, token: str) -> Document:
    """Returns an item to store, with the fields that OpenAI's API has for it, and those alone that the model
    was shown."""
    kind = item.type or "message"
    head = {"id": item.id or f"{_PREFIXES.get(kind, 'msg')}_{token}", "type": kind}
    match kind:
        case "function_call":
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {**head, "status": "completed", **call}
        case "function_call_output":
            output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
            return {**head, "status": "completed", "call_id": item.call_id, "output": output}
        case "reasoning":
            return {**head, "summary": [], "content": _parts(item.content, "reasoning_text")}
        case _:
            part = "output_text" if item.role == "assistant" else "input_text"
            content = _parts(item.content, part)
            return {**head, "status": "completed", "role": item.role, "content": content}


def _parts(content: object, kind: str) -> list[Document]:
    """The parts of a content, which may be a string: texts, and refusals of the model."""
    given: list[Any] = content if isinstance(content, list) else [{"text": content}]
    more: Document = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    parts: list[Document] = []
    for part in given:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append({"type": kind, "text": part["text"], **more})
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            parts.append({"type": "refusal", "refusal": part["refusal"]})
    return parts
