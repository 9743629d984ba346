"""What a large GenerateRequest shows before it is parsed: checking a megabyte of UTF-8 alone takes 25 ms."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from baton.request_fields.table import MOST_ITEMS
from baton.v1.router_pb2 import GenerateRequest
from services.router.request.sizes import too_many

_MODEL = GenerateRequest.MODEL_FIELD_NUMBER
_TEXT = GenerateRequest.TEXT_FIELD_NUMBER
_VARINT, _LENGTH_DELIMITED = 0, 2
# Wire type → bytes of the value.
_FIXED_BYTES = {1: 8, 5: 4}
# Number → name, of the fields with a bound on their items.
_COUNTED = {
    field.number: field.name for field in GenerateRequest.DESCRIPTOR.fields if field.name in MOST_ITEMS
}
# More than a message has that keeps to all bounds. To walk over them takes 1 ms.
_MOST_FIELDS = 1024
_MOST_VARINT_BYTES = 10

# Number of a field, begin and end of its value.
_Field = tuple[int, int, int]


def without_text(data: bytes, model: str) -> tuple[int, bytes]:
    """Of a message that begins with this model and a text, as clients write it: how many bytes the text has,
    and the message without it. 0 and nothing of any other."""
    named = _MODEL, model.encode()
    match list(itertools.islice(_fields(data), 2)):
        case [(first, begin, end), (second, text, text_end)]:
            if (first, data[begin:end]) == named and second == _TEXT:
                return text_end - text, data[:end] + data[text_end:]
    return 0, b""


def check_counts(data: bytes | bytearray) -> None:
    """Raises FieldError for a field with too many items, as `sizes.check_message` does. Lists of numbers that
    are packed, as clients write them, are left to that."""
    counts: Counter[int] = Counter()
    for number, _, _ in itertools.islice(_fields(data), _MOST_FIELDS):
        counts[number] += 1
        if number in _COUNTED and counts[number] > MOST_ITEMS[_COUNTED[number]]:
            raise too_many(_COUNTED[number])


def _fields(data: bytes | bytearray) -> Iterator[_Field]:
    """The fields of a message in order, up to what is none. Only what lies in the data."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        begin = place
        if kind == _VARINT:
            _, place = _varint(data, place)
        elif kind == _LENGTH_DELIMITED:
            length, begin = _varint(data, place)
            place = begin + length
        elif kind in _FIXED_BYTES:
            place += _FIXED_BYTES[kind]
        else:
            return
        if place > len(data):
            return
        yield tag >> 3, begin, place


def _varint(data: bytes | bytearray, place: int) -> tuple[int, int]:
    """A varint and the place after it; a place beyond the data where there is none."""
    value = 0
    for index, byte in enumerate(data[place : place + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return value, place + index + 1
    return value, len(data) + 1
