"""Encodes the responses that most tokens are sent in, without building a message."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.request.request import Delta, Request

# Keys of GenerateResponse's fields: number << 3 | wire type (0: varint, 2: bytes).
_REQUEST_ID, _FIRST_NUMBER, _TOKEN_IDS, _TEXT, _INDEX, _RESUMABLE = (
    b"\x0a", b"\x10", b"\x1a", b"\x22", b"\x48", b"\x58",
)  # fmt: skip
_TRUE = b"\x01"


class PlainResponses:
    """One output's responses whose deltas have token ids and text, and nothing else, as bytes: those that
    protobuf makes of the same message."""

    def __init__(self, request: Request) -> None:
        self._head = _REQUEST_ID + _varint(len(request.id)) + request.id
        self._index = _INDEX + _varint(request.choice) if request.choice else b""
        self._possible = request.structure is None and not request.wants_logprobs

    def encode(self, delta: Delta) -> bytes | None:
        """A serialised GenerateResponse; None for a delta with more in it."""
        if not self._possible or delta.opening or delta.finish is not None:
            return None
        number, text = delta.first_number, delta.text
        parts = [self._head]
        if number:
            parts += (_FIRST_NUMBER, _varint(number))
        if delta.token_ids:
            ids = _varints(delta.token_ids)
            parts += (_TOKEN_IDS, _varint(len(ids)), ids)
        if text:
            data = text.encode()
            parts += (_TEXT, _varint(len(data)), data)
        parts.append(self._index)
        if delta.resumable:
            parts += (_RESUMABLE, _TRUE)
        return b"".join(parts)


def _varints(values: Sequence[int]) -> bytes:
    return _varint(values[0]) if len(values) == 1 else b"".join(map(_varint, values))


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    if value < 16_384:
        return bytes((value & 127 | 128, value >> 7))
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
