"""Reads one call, a JSON object with a name and arguments, while it is being written.

The arguments are passed on as they come, as soon as the name is known. What the arguments are made of is not
checked: a model that is not guided may write anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, auto

from services.router.tools.markers import BLANK
from services.router.tools.nesting import Nesting
from services.router.tools.scanner import MalformedCallError, Tools

_ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    START = auto()
    KEY = auto()  # before a key, or the end
    COLON = auto()
    VALUE = auto()  # before a value
    WITHIN = auto()  # in a value
    AFTER = auto()  # behind a value
    END = auto()


@dataclass
class CallScanner:
    """A Scanner. `tools`: those that may be called."""

    tools: Tools
    raw: str = ""
    name: str | None = None
    _at: _At = _At.START
    _key: str = ""
    _value: list[str] = field(default_factory=list)
    _nesting: Nesting = field(default_factory=Nesting)
    _arguments: list[str] = field(default_factory=list)
    _has_arguments: bool = False

    @property
    def ended(self) -> bool:
        """Whether the object has ended."""
        return self._at is _At.END

    def push(self, text: str) -> str:
        """Takes text up to the object's end; the rest. Raises MalformedCallError."""
        for place, character in enumerate(text):
            try:
                self._take(character)
                if self._at is _At.END:
                    self._finish()
            except MalformedCallError as error:
                error.rest = text[place:]
                raise
            if self._at is _At.END:
                return text[place + 1 :]
        if self.name is None:
            self.raw += text
        return ""

    def take_arguments(self) -> str:
        """The text of the arguments that came since the last call; none before the name."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _take(self, character: str) -> None:
        if self._at is _At.WITHIN:
            self._within(character)
        elif character in BLANK:
            return
        elif self._at is _At.START and character == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and character == '"':
            self._begin(character)
        elif self._at in (_At.KEY, _At.AFTER) and character == "}":
            self._at = _At.END
        elif self._at is _At.AFTER and character == ",":
            self._at = _At.KEY
        elif self._at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE:
            self._begin(character)
        else:
            raise MalformedCallError

    def _begin(self, character: str) -> None:
        """The first character of a key or a value."""
        self._key = "" if self._at is _At.KEY else self._key
        self._value.clear()
        self._nesting = Nesting()
        self._at = _At.WITHIN
        self._within(character)

    def _within(self, character: str) -> None:
        if not self._nesting.open and self._value and character in ",}" + BLANK:
            self._end_value()  # of a number, true, false, null
            self._take(character)
            return
        self._value.append(character)
        if self._streams:
            self._arguments.append(character)
        self._nesting.take(character)
        if self._nesting.depth < 0:
            raise MalformedCallError
        if not self._nesting.open and character in '"}]':
            self._end_value()

    @property
    def _streams(self) -> bool:
        """Whether the value is an object of arguments, passed on as it is."""
        return self._key in _ARGUMENTS and self._value[0] == "{"

    def _end_value(self) -> None:
        try:
            text = "".join(self._value)
            if not self._key:
                self._key = json.loads(text)
                self._at = _At.COLON
                return
            self._at = _At.AFTER
            if self._key == "name":
                name = json.loads(text)
                if name not in self.tools:
                    raise MalformedCallError
                self.name = name
            elif self._key in _ARGUMENTS:
                self._has_arguments = True
                if text[0] == '"':  # the JSON text of the arguments
                    self._arguments.append(json.loads(text))
                elif text[0] != "{":
                    raise MalformedCallError
            self._key = ""
        except ValueError:
            raise MalformedCallError from None

    def _finish(self) -> None:
        if self.name is None:
            raise MalformedCallError
        if not self._has_arguments:
            self._arguments.append("{}")
