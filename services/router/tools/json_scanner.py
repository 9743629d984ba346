"""Checks a JSON value (RFC 8259) while it is being written.

Each character is read once, without recursion. What is read does not depend on how the text is cut: escapes
and words (numbers, `true`, `false`, `null`) are read as a whole, once what follows them is known.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from services.router.tools.held_text import BLANKS, run_end

# Levels of nesting; more is no value. Readers of such a value recurse (Python's up to about 1,000).
MOST_DEPTH = 256
# Characters of a number. Python reads integers of 4,300 digits at most.
_LONGEST_WORD = 512
# No possessive repeats of groups, which Python before 3.11.5 matches wrongly.
_STRING = re.compile(r'[^"\\\x00-\x1f]*(?:(?:\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# Items of a list that are short words, each with its comma: a list of numbers is read many items at once.
_ITEMS = re.compile(
    r"(?:[ \t\r\n]*(?:-?(?:0|[1-9][0-9]{0,16})(?:\.[0-9]{1,17})?(?:[eE][-+]?[0-9]{1,3})?|true|false|null)"
    r"[ \t\r\n]*,)*"
)
_CLOSING = {"{": "}", "[": "]"}


class _Next(Enum):
    VALUE = auto()
    ITEM = auto()  # or the end of a list
    KEY = auto()
    FIRST_KEY = auto()  # or the end of an object
    COLON = auto()
    AFTER = auto()  # a comma or the end, behind a value
    STRING = auto()  # within one
    KEY_STRING = auto()


class JsonScanner:
    """State of a scan. `ended`: the value is complete. `broken`: what comes next is no part of a JSON
    value."""

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        self._open: list[str] = []
        self._next = _Next.VALUE

    def scan(self, text: str, at: int, *, last: bool = False) -> int:
        """Reads from an index on; returns up to which one the text belongs to the value. The rest is to come
        again with what follows it, unless the value has ended or is broken. `last`: nothing follows."""
        while not (self.ended or self.broken):
            if self._next in (_Next.STRING, _Next.KEY_STRING):
                at = self._string(text, at)
            else:
                at = run_end(BLANKS, text, self._items(text, at))
                if at == len(text):
                    return at
                at = self._token(text, at, last)
            if at < 0:  # more is needed
                return ~at
        return at

    def _items(self, text: str, at: int) -> int:
        """Reads items of a list that are simple."""
        if self._next in (_Next.VALUE, _Next.ITEM) and self._open and self._open[-1] == "[":
            end = run_end(_ITEMS, text, at)
            if end > at:
                self._next = _Next.VALUE
            return end
        return at

    def _string(self, text: str, at: int) -> int:
        """Reads on in a string. Less than 0: ~index where more text is needed."""
        at = run_end(_STRING, text, at)
        if at == len(text) or _ESCAPE_BEGUN.fullmatch(text, at):
            return ~at
        if text[at] != '"':
            self.broken = True
            return at
        if self._next is _Next.KEY_STRING:
            self._next = _Next.COLON
        else:
            self._value_ended()
        return at + 1

    def _token(self, text: str, at: int, last: bool) -> int:
        """Reads a bracket, comma, colon, quote or word. Less than 0: ~index where more text is needed."""
        character, due = text[at], self._next
        if due in (_Next.VALUE, _Next.ITEM):
            if character == '"':
                self._next = _Next.STRING
            elif character in "{[" and len(self._open) < MOST_DEPTH:
                self._open.append(character)
                self._next = _Next.FIRST_KEY if character == "{" else _Next.ITEM
            elif character == "]" and due is _Next.ITEM:
                self._close()
            else:
                return self._word(text, at, last)
        elif due in (_Next.KEY, _Next.FIRST_KEY) and character == '"':
            self._next = _Next.KEY_STRING
        elif due is _Next.COLON and character == ":":
            self._next = _Next.VALUE
        elif due is _Next.AFTER and character == ",":
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
        elif due in (_Next.AFTER, _Next.FIRST_KEY) and character == _CLOSING[self._open[-1]]:
            self._close()
        else:
            self.broken = True
            return at
        return at + 1

    def _word(self, text: str, at: int, last: bool) -> int:
        end = run_end(_WORD, text, at)
        if end == len(text) and end - at <= _LONGEST_WORD and not last:
            return ~at
        if end - at > _LONGEST_WORD or not _SCALAR.fullmatch(text, at, end):
            self.broken = True
            return at
        self._value_ended()
        return end

    def _close(self) -> None:
        self._open.pop()
        self._value_ended()

    def _value_ended(self) -> None:
        self._next = _Next.AFTER
        self.ended = not self._open
