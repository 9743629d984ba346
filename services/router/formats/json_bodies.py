"""JSON bodies: parses them, and encodes large ones piece by piece."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from starlette.types import Send

from baton.base.errors import FieldError

# List items encoded at once. With 20 logprobs each that takes about 1 ms.
_BATCH = 32
# Levels of objects and lists. What is parsed is walked again where the stack is deeper: by templates, and by
# encoders. Each must have room for it, so the bound is far below that of Python's parser.
MOST_LEVELS = 256
# Bytes from which on a part of a body is sent.
_PART_BYTES = 32 * 1024

# Made once: json.dumps makes an encoder for each call.
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
encode_with_lists = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list
).encode
"""Encodes a document, with iterators as lists."""

# Between the items of a list by `encode_lines`.
LINE = ",\n"


def encode_lines(items: Iterable[object]) -> bytes:
    """Encodes a list with each item on a line of its own: no other byte of it is a line's end, so that items
    are found without parsing them."""
    return utf8(f"[{LINE.join(map(encode, items))}]")


def utf8(text: str) -> bytes:
    """Encodes an answer. Half a surrogate pair, which a model may have written as an escape, becomes `?`."""
    return text.encode("utf-8", "replace")


def parse_json(body: bytes | bytearray) -> object:
    """Parses a body; FieldError if it is not JSON, an object in it has a key twice, or it is not valid
    Unicode."""
    try:
        # Strictly: json.loads lets half a surrogate pair pass.
        text = body.decode(json.detect_encoding(body))
        return parse_text(text, _STRICT.decode)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {type(error).__name__}") from None


def parse_text(text: str, decode: Callable[[str], object] = json.loads) -> object:
    """Parses JSON that is a text of a body; ValueError or RecursionError if it is not JSON, is nested deeper
    than `MOST_LEVELS`, or has half a surrogate pair, which JSON can escape and no later step could encode."""
    document = decode(text)
    if text.count("{") + text.count("[") > MOST_LEVELS and _levels_exceed(document, MOST_LEVELS):
        raise ValueError("nested too deeply")
    if "\\ud" in text or "\\uD" in text:
        encode(document).encode()
    return document


def _levels_exceed(document: object, most: int) -> bool:
    """Returns whether objects and lists are nested deeper than `most`."""
    level = [document]
    for _ in range(most + 1):
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        if not inner:
            return False
        level = [one for values in inner for one in values]
    return True


def _no_constant(name: str) -> float:
    """Refuses NaN and Infinity, which are not JSON though Python's parser accepts them."""
    raise ValueError(name)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuses a key that comes twice, of which two readers may see different values."""
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key comes twice")
    return document


_STRICT = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_object)


def json_pieces(document: object) -> Iterator[str]:
    """Encodes a document piece by piece. An iterator in it is encoded as a list, read as it is encoded."""
    if isinstance(document, dict):
        opening = "{"
        for key, value in document.items():
            yield f"{opening}{encode(key)}:"
            yield from json_pieces(value)
            opening = ","
        yield "}" if document else "{}"
    elif isinstance(document, Iterator):
        yield from _list_pieces(document)
    else:
        yield encode(document)


def _list_pieces(items: Iterator[object]) -> Iterator[str]:
    opening = "["
    for first in items:
        if isinstance(first, dict) and any(isinstance(value, dict | Iterator) for value in first.values()):
            yield opening
            yield from json_pieces(first)
        else:
            batch = [first, *itertools.islice(items, _BATCH - 1)]
            yield opening + encode_with_lists(batch)[1:-1]
        opening = ","
    yield "]" if opening == "," else "[]"


Headers = Sequence[tuple[bytes, bytes]]


async def send_json(send: Send, document: object, more_headers: Headers = ()) -> None:
    """Responds with status 200 and the document, encoded while it is sent and other tasks run."""
    common = [(b"content-type", b"application/json"), *more_headers]
    part = bytearray()
    started = False
    for piece in json_pieces(document):
        part += utf8(piece)
        if len(part) >= _PART_BYTES:
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": common})
                started = True
            await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
            await asyncio.sleep(0)
            part.clear()
    if not started:
        headers = [*common, (b"content-length", b"%d" % len(part))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(part)})
