"""Requests that are wrong in ways only one API can say: bodies of odd types, broken JSON, broken messages."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.v1.router_pb2 import GenerateRequest
from services.router.formats.field_table import TABLES
from tests.router.conftest import MODEL
from tests.router.fuzz.asks import TEXTS, draw_ask

# Their fields are in no other body.
PATHS = tuple(TABLES)
_SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, 2**31, 2**63, 2**64, 10**40, 1e308, -1e308),
    *("", "a", "\ud800", "1", "null", "x" * 2000, "http://169.254.169.254/", "file:///etc/passwd"),
)
_BROKEN = (b"", b"{", b"[]", b"null", b'"a"', b"{]", b"\xff\xfe", b"NaN", b'{"a":1e999}', b"[" * 100_000)


def draw_body(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body that is often wrong."""
    path = draw.choice(PATHS)
    if draw.random() < 0.1:
        return path, draw.choice(_BROKEN)
    document = _valid(path)
    names = list(TABLES[path])
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        name = draw.choice(names) if draw.random() < 0.9 else draw.choice(("odd", "\ud800", "", "a" * 300))
        document[name] = _value(draw, 0)
    if draw.random() < 0.1:
        document.pop(draw.choice(list(document)), None)
    body = json.dumps(document).encode()
    return path, _mutated(draw, body) if draw.random() < 0.15 else body


def draw_message(draw: random.Random) -> bytes:
    """A request with any values in a few fields; or one with bytes changed, cut or added; or no message."""
    shape = draw.random()
    if shape < 0.1:
        return draw.randbytes(draw.randrange(200))
    if shape < 0.4:
        return _mutated(draw, draw_ask(draw).message().SerializeToString())
    request = GenerateRequest(model=MODEL, text="a", max_tokens=2)
    _fill(draw, request, draw.choice((1, 1, 2, 3)))
    return request.SerializeToString() + draw.choice((b"", b"", b"\xe8\x04\x01"))  # the last: field 77


def _fill(draw: random.Random, message: Message, count: int) -> None:
    """Sets fields of a message, whatever their types, to values that the types allow."""
    fields: list[Any] = [*message.DESCRIPTOR.fields]
    for field in draw.sample(fields, min(count, len(fields))):
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            for one in [inner.add() for _ in range(draw.randrange(3))] if field.is_repeated else [inner]:
                one.SetInParent()
                _fill(draw, one, 2)
        elif field.is_repeated:
            getattr(message, field.name).extend(_scalar(draw, field) for _ in range(draw.randrange(4)))
        else:
            setattr(message, field.name, _scalar(draw, field))


def _scalar(draw: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return draw.choice(TEXTS)
        case FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return draw.choice((0.0, 0.5, 1.0, -1.0, 1e30, math.inf, -math.inf, math.nan, 5e-324))
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_ENUM:  # enums are open
            return draw.choice((0, 1, -1, 2**31 - 1, -(2**31)))
        case FieldDescriptor.TYPE_FIXED64:
            return draw.choice((0, 1, 2**63, 2**64 - 1))
        case _ if field.name == "n":  # as many as are allowed would be dear
            return draw.choice((0, 1, 2, 129, 2**32 - 1))
        case _:
            return draw.choice((0, 1, 2, 16, 128, 2**31, 2**32 - 1))


def _valid(path: str) -> dict[str, Any]:
    """A body that the path accepts."""
    messages = [{"role": "user", "content": "a"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 2},
        "/v1/chat/completions": {"model": MODEL, "messages": messages, "max_tokens": 2},
        "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [97]},
    }
    return bodies[path]


def _value(draw: random.Random, depth: int) -> Any:
    """A random JSON value of little depth."""
    shape = draw.random()
    if depth > 3 or shape < 0.6:
        return draw.choice(_SCALARS)
    count = draw.randrange(4)
    if shape < 0.8:
        return [_value(draw, depth + 1) for _ in range(count)]
    keys = ("type", "text", "role", "content", "format", "json_schema", "5", "a", "function")
    return {draw.choice(keys): _value(draw, depth + 1) for _ in range(count)}


def _mutated(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(3):
            case 0 if place < len(changed):
                changed[place] = draw.randrange(256)
            case 1:
                del changed[place : place + draw.randrange(1, 8)]
            case _:
                changed[place:place] = draw.randbytes(draw.randrange(1, 4))
    return bytes(changed)
