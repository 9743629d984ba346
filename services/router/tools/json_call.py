"""Reads one call that is a JSON object with a name and arguments, in any order.

Arguments behind the name are passed on as they come. They may be left out or null, which means none, or be
the JSON text of an object, as a string.
"""

from __future__ import annotations

import json

from baton.base.utf8 import is_utf8
from services.router.tools.call_reader import (
    LONGEST_NAME,
    NotACallError,
    Tools,
    json_value,
    next_character,
    stream_arguments,
)
from services.router.tools.held_text import HeldText, Reading
from services.router.tools.json_scanner import JsonScanner
from services.router.tools.pieces import FoundPieces

_ARGUMENTS = ("arguments", "parameters")
# A character of a name is written with six at most, and there are two quotes.
_LONGEST_NAME_TEXT = 6 * LONGEST_NAME + 2


class JsonCall:
    """A CallReader. The text is at the object's brace."""

    def __init__(self, held: HeldText, tools: Tools, found: FoundPieces) -> None:
        self._held = held
        self._tools = tools
        self._found = found
        self._members = 0

    def read(self) -> Reading[bool]:
        """Reads a call that is a JSON object, as `CallReader` says."""
        held, found = self._held, self._found
        held.at += 1
        name: str | None = None
        arguments: str | None = None
        while (key := (yield from self._key())) is not None:
            if key == "name" and name is None:
                name = yield from self._name()
            elif key in _ARGUMENTS and arguments is None:
                if name is not None and (yield from next_character(held)) == "{":
                    found.begin(name)
                    return (yield from stream_arguments(held, found)) and (yield from self._rest())
                arguments = _arguments_of((yield from json_value(held)).strip())
            else:
                yield from json_value(held)
            if name is not None and arguments is not None:
                found.whole(name, arguments)
                return (yield from self._rest())
        if name is None:
            raise NotACallError
        found.whole(name, arguments or "{}")
        return True

    def _key(self) -> Reading[str | None]:
        """The key of the next member, whose value is next; None at the object's end."""
        held = self._held
        character = yield from next_character(held)
        if character == "}":
            held.at += 1
            return None
        if self._members:
            if character != ",":
                raise NotACallError
            held.at += 1
            character = yield from next_character(held)
        self._members += 1
        if character != '"':
            raise NotACallError
        key: str = json.loads((yield from json_value(held)))
        if (yield from next_character(held)) != ":":
            raise NotACallError
        held.at += 1
        return key

    def _name(self) -> Reading[str]:
        if (yield from next_character(self._held)) != '"':
            raise NotACallError
        text = yield from json_value(self._held)
        name: str = json.loads(text) if len(text) <= _LONGEST_NAME_TEXT else ""
        if name not in self._tools:
            raise NotACallError
        return name

    def _rest(self) -> Reading[bool]:
        """Reads the members behind the arguments, which say nothing. Where they break, they are text."""
        self._held.keep()
        try:
            while (yield from self._key()) is not None:
                yield from json_value(self._held)
        except NotACallError:
            self._held.rewind()
            return False
        return True


def _arguments_of(value: str) -> str:
    """The arguments as a value has them: an object as it is, or as the text of a string. Raises
    NotACallError."""
    if value.startswith('"'):
        value = json.loads(value).strip()
    if value in ("", "null"):
        return "{}"
    scanner = JsonScanner()
    whole = value.startswith("{") and scanner.scan(value, 0) == len(value) and scanner.ended
    if not whole or not is_utf8(value):
        raise NotACallError
    return value
