"""The stored record of a response: its document and the items that it was given, those of earlier turns too.

So one record has a whole conversation, whatever becomes of the responses before it.

record = bytes of the document (u32, little endian) | document | items, both JSON

The document has its output on a line of its own, and the items are a line each (`json_bodies.encode_lines`),
so that reading a large record parses nothing. Records of earlier versions have no lines.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.router.formats.json_bodies import LINE, encode, utf8

_LENGTH = struct.Struct("<I")
# Between two items, each of which begins with its id. Within a string its quotes would be escaped.
_LINE, _BEGIN = LINE.encode(), b'{"id":"'
_NEXT = re.compile(rb",(?=" + re.escape(_BEGIN) + rb")")
_ID = re.compile(rb'\{"id":("(?:[^"\\]|\\.)*")')

# JSON, or what it is once parsed.
Item = bytes | dict[str, Any]


def stored_document(document: Mapping[str, object]) -> bytes:
    """The bytes of a response's document."""
    parts = [f"{encode(name)}:{_line(name, value)}" for name, value in document.items()]
    return utf8(f"{{{','.join(parts)}}}")


def _line(name: str, value: object) -> str:
    return f"\n{encode(value)}\n" if name == "output" else encode(value)


@dataclass(frozen=True)
class StoredResponse:
    """A response to store. `document`: the response as it was answered, without logprobs. `items`: a list of
    input items."""

    document: bytes
    items: bytes

    def __len__(self) -> int:
        """Length of `packed` in bytes."""
        return _LENGTH.size + len(self.document) + len(self.items)

    def packed(self) -> bytes:
        """The bytes that are stored: the document's length, the document, the items."""
        return _LENGTH.pack(len(self.document)) + self.document + self.items

    @classmethod
    def unpacked(cls, record: bytes) -> StoredResponse:
        """Parses the bytes that `packed` made."""
        end = _LENGTH.size + _LENGTH.unpack_from(record)[0]
        return cls(record[_LENGTH.size : end], record[end:])

    def conversation(self) -> bytes:
        """The items with which a next turn begins: those that it was given, and its output."""
        lines = self.document.split(b"\n")
        output = lines[1] if len(lines) == 3 else utf8(encode(json.loads(self.document)["output"]))
        parts = [part for part in (self.items[1:-1], output[1:-1]) if part]
        return b"[" + _LINE.join(parts) + b"]"

    def each_item(self) -> list[Item]:
        """Returns the conversation's items, for `json_of`."""
        within = self.items[1:-1]
        if _LINE in within:
            return [*within.split(_LINE)]
        if not within or within.startswith(_BEGIN):
            return [*_NEXT.split(within)] if within else []
        found: list[Item] = json.loads(self.items)  # not written by any router
        return found


def json_of(item: Item) -> bytes:
    """Returns an item as JSON bytes."""
    return item if isinstance(item, bytes) else utf8(encode(item))


def id_of(item: Item) -> bytes:
    """An item's id, as JSON."""
    if not isinstance(item, bytes):
        return utf8(encode(item.get("id")))
    found = _ID.match(item)
    return b"null" if found is None else found[1]
