"""Counts the items of a body's fields in its JSON text, before anything is built of it.

Building the 60,000 members of an object takes tens of milliseconds; to see that there are more than 300 takes
a tenth of one. What is counted here is counted again in the document (`sizes.check_document`), so this may
give up: at what is no JSON, and at values nested deeper than `_DEPTH`. A field whose name is written with
escapes is not found.
"""

from __future__ import annotations

import functools
import re
import sys

from baton.request_fields.table import MOST_ITEMS
from services.router.request.sizes import (
    GRAMMARS,
    MAX_FIELDS,
    MAX_GRAMMAR_FIELD_BYTES,
    MAX_MESSAGE_FIELDS,
    MESSAGES,
    grammar_too_large,
    most_token_ids,
    too_many,
    too_many_fields,
    too_many_message_fields,
    too_many_messages,
)
from services.router.request.validate import context_exceeded

# Objects and lists within a member's value.
_DEPTH = 8
# Before Python 3.11.5 possessive quantifiers of groups match what they should not, and may never end
# (CPython's gh-106052 and gh-100061). An atomic group says the same, but takes 40 to 75 bytes of memory for
# each byte of text.
_GROUPS_POSSESSIVE = sys.version_info >= (3, 11, 5)


def _repeated(pattern: bytes, count: bytes = b"*") -> bytes:
    """The pattern as often as it matches, and never less often."""
    group = rb"(?:" + pattern + rb")" + count
    return group + rb"+" if _GROUPS_POSSESSIVE else rb"(?>" + group + rb")"


# A quote within a string, after one or three backslashes; the quote at its end, after none or two. To go from
# quote to quote is five times as fast as from escape to escape, which finds the end of any other string.
_INNER_QUOTE = rb'(?:(?<=[^\\]\\)|(?<=[^\\]\\\\\\))"'
_LAST_QUOTE = rb'(?:(?<!\\)|(?<=[^\\]\\\\))"'
_USUAL_STRING = rb'"' + _repeated(rb'[^"]*+' + _INNER_QUOTE) + rb'[^"]*+' + _LAST_QUOTE
_STRING = rb"(?:" + _USUAL_STRING + rb'|"' + _repeated(rb'[^"\\]++|\\.') + rb'")'


def _container(depth: int) -> bytes:
    """The pattern of an object or list that has so many levels of others in it."""
    within = rb'[^"\[\]{}]++|' + _STRING
    pattern = rb"[\[{]" + _repeated(within) + rb"[\]}]"
    for _ in range(depth):
        pattern = rb"[\[{]" + _repeated(within + rb"|" + pattern) + rb"[\]}]"
    return pattern


# One item of a list, or one member of an object with its key. No pattern backtracks, so each is linear.
_ITEM = _repeated(rb'[^"\[\]{},]++|' + _STRING + rb"|" + _container(_DEPTH), b"+")
_VALUE = re.compile(_ITEM, re.DOTALL)
# What follows within a list, and its end.
_REST = re.compile(_container(_DEPTH).removeprefix(rb"[\[{]") + rb"\s*+", re.DOTALL)
# UTF-16, which JSON may be in, has no quote here.
_OPENING = re.compile(rb'\s*+\{\s*+(?=")')
_KEY = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
# The beginning of a list of messages, up to the first one with too many fields.
_FEW_MEMBERS = _repeated(_ITEM + b",", b"{0,%d}" % (MAX_MESSAGE_FIELDS - 1)) + _ITEM
_SMALL_OBJECT = rb"\{" + _repeated(_FEW_MEMBERS, b"?") + rb"\}"
_SMALL_MESSAGES = re.compile(
    rb"\[" + _repeated(rb"\s*+" + _SMALL_OBJECT + rb"\s*+,") + rb"\s*+(?=\{)", re.DOTALL
)
_FLAT_LIST = re.compile(rb'\[([^"\[\]{}]*+)\]')


def check_counts(body: bytes | bytearray, context: int, first_bytes: int | None = None) -> None:
    """Raises FieldError for a body with too many fields, or for a field with too many items, as
    `sizes.check_document` does.

    `first_bytes`: reads no further; 32 KiB take 5 ms at most. `context`: in tokens.
    """
    end = len(body) if first_bytes is None else min(first_bytes, len(body))
    opening = _OPENING.match(body, 0, end)
    place, fields = opening.end() if opening is not None else end, 0
    while (key := _KEY.match(body, place, end)) is not None:
        fields += 1
        if fields > MAX_FIELDS:
            raise too_many_fields()
        name, begin = key[1][1:-1].decode(errors="replace"), key.end()
        if name in MESSAGES:
            begin = _check_messages(name, body, begin, end, context)
        else:
            _check_field(name, body, begin, end, context)
        rest = _REST if begin > key.end() else _VALUE
        value = rest.match(body, begin, end)
        if value is None:
            return
        if name in GRAMMARS and _least_bytes(body, *value.span()) > MAX_GRAMMAR_FIELD_BYTES:
            raise grammar_too_large(name)
        if body[value.end() : value.end() + 1] != b",":
            return
        place = value.end() + 1


def check_items(name: str, text: bytes) -> None:
    """Raises FieldError for a field whose value has this JSON text, with too many items."""
    if _more_than(MOST_ITEMS[name]).match(text):
        raise too_many(name)


def _check_field(name: str, body: bytes | bytearray, place: int, end: int, context: int) -> None:
    """Checks the value that begins at `place`."""
    if name in MOST_ITEMS and _more_than(MOST_ITEMS[name]).match(body, place, end):
        raise too_many(name)
    if name == "prompt" and (ids := _FLAT_LIST.match(body, place, end)) is not None:
        count = body.count(b",", ids.start(1), ids.end(1)) + 1
        if count > most_token_ids(context):
            raise context_exceeded(name, count, context)


def _check_messages(name: str, body: bytes | bytearray, place: int, end: int, context: int) -> int:
    """Checks a list of messages. Returns a place in it from which it is passed over, its beginning if that is
    no list of messages."""
    if body.count(b",", place, end) >= context and _more_than(context).match(body, place, end):
        raise too_many_messages(name, context)
    few = _SMALL_MESSAGES.match(body, place, end)
    if few is None:
        return place
    if _more_than(MAX_MESSAGE_FIELDS).match(body, few.end(), end):
        raise too_many_message_fields(name)
    return few.end()


def _least_bytes(body: bytes | bytearray, begin: int, end: int) -> int:
    """How many bytes a value's text has at least without white space and escapes."""
    spaces = sum(body.count(space, begin, end) for space in (b" ", b"\n", b"\r", b"\t"))
    escapes = body.count(b"\\", begin, end) + 4 * body.count(b"\\u", begin, end)
    return end - begin - spaces - escapes


@functools.lru_cache(maxsize=16)
def _more_than(count: int) -> re.Pattern[bytes]:
    """Matches an object or list with more items than that."""
    return re.compile(rb"[\[{]" + _repeated(_ITEM + b",", b"{%d}" % count) + _ITEM, re.DOTALL)
