"""What is stored of a response: its document and the items that it was given, those of earlier turns too.

So one record has a whole conversation, whatever becomes of the responses before it.

record = bytes of the document (u32, little endian) | document | items, both JSON
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

from services.router.formats.json_bodies import encode

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class StoredResponse:
    """`document`: the response as it was answered, without logprobs. `items`: a list of input items."""

    document: bytes
    items: bytes

    def __len__(self) -> int:
        """Bytes of `packed`."""
        return _LENGTH.size + len(self.document) + len(self.items)

    def packed(self) -> bytes:
        """The bytes that are stored: the document's length, the document, the items."""
        return _LENGTH.pack(len(self.document)) + self.document + self.items

    @classmethod
    def unpacked(cls, record: bytes) -> StoredResponse:
        """The reverse of `packed`."""
        end = _LENGTH.size + _LENGTH.unpack_from(record)[0]
        return cls(record[_LENGTH.size : end], record[end:])

    def conversation(self) -> bytes:
        """The items with which a next turn begins: those that it was given, and its output."""
        output = encode(json.loads(self.document)["output"]).encode()
        parts = [part for part in (self.items[1:-1], output[1:-1]) if part]
        return b"[" + b",".join(parts) + b"]"
