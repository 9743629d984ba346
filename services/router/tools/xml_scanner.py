"""Reads one call that is written as tags: `<function=name><parameter=key>value</parameter>…</function>`.

Its arguments become a JSON object, each value of the type that the tool's schema gives it. Text is passed on
as it is written; values of other types when they are complete. One line break behind a parameter's opening
tag and one before its closing tag belong to the tags.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from services.router.tools.markers import BLANK
from services.router.tools.parameter_types import STRING, json_text, types_of
from services.router.tools.scanner import LONGEST_NAME, MalformedCallError, Tools

FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_LONGEST_KEY = 1024


class _At(Enum):
    START = auto()
    BETWEEN = auto()  # before a parameter, or the end
    BEGIN = auto()  # behind a parameter's tag
    VALUE = auto()
    END = auto()


class XmlScanner:
    """A Scanner. `tools`: those that may be called, and the schemas that say the types of values."""

    def __init__(self, tools: Tools) -> None:
        self.raw = ""
        self.name: str | None = None
        self._tools = tools
        self._at = _At.START
        self._held = ""
        self._types: frozenset[str] = frozenset()
        self._empty = True  # no parameter has come
        self._arguments: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether the function's tag was closed."""
        return self._at is _At.END

    def push(self, text: str) -> str:
        """Takes text up to the function's end; the rest. Raises MalformedCallError."""
        self._held += text
        while self._step():
            pass
        if self.name is None:
            self.raw += text
        if not self.ended:
            return ""
        rest, self._held = self._held, ""
        return rest

    def take_arguments(self) -> str:
        """The JSON text of the arguments that came since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _step(self) -> bool:
        """Takes some of the held text; False where more is needed."""
        match self._at:
            case _At.START:
                return self._start()
            case _At.BETWEEN:
                return self._between()
            case _At.BEGIN:
                if self._held:
                    self._held, self._at = self._held.removeprefix("\n"), _At.VALUE
                return self._at is _At.VALUE
            case _At.VALUE:
                return self._value()
            case _At.END:
                return False

    def _start(self) -> bool:
        name = self._tag(self._held, FUNCTION, LONGEST_NAME)
        if name is None:
            return False
        if name not in self._tools:
            raise MalformedCallError
        self.name, self._at = name, _At.BETWEEN
        return True

    def _between(self) -> bool:
        held = self._held.lstrip(BLANK)
        if held.startswith(_FUNCTION_END):
            self._arguments.append("{}" if self._empty else "}")
            self._held, self._at = held.removeprefix(_FUNCTION_END), _At.END
            return True
        if _FUNCTION_END.startswith(held):
            return False
        key = self._tag(held, _PARAMETER, _LONGEST_KEY)
        if key is None:
            return False
        self._types = types_of(self._tools[self.name or ""], key)
        quote = '"' if self._types == STRING else ""
        self._arguments.append(f"{'{' if self._empty else ', '}{_quoted(key)}: {quote}")
        self._empty, self._at = False, _At.BEGIN
        return True

    def _tag(self, held: str, opening: str, longest: int) -> str | None:
        """What a tag names, which is taken; None where it has not ended. Raises MalformedCallError."""
        if opening.startswith(held):
            return None
        name, end, rest = held.removeprefix(opening).partition(">")
        if not held.startswith(opening) or len(name) > longest:
            raise MalformedCallError(held)
        if not end:
            return None
        self._held = rest
        return name.strip(BLANK)

    def _value(self) -> bool:
        value, end, rest = self._held.partition(_PARAMETER_END)
        if end:
            value = value.removesuffix("\n")
            text = _quoted(value)[1:] if self._types == STRING else json_text(value, self._types)
            self._arguments.append(text)
            self._held, self._at = rest, _At.BETWEEN
            return True
        if self._types == STRING:
            final = _final_length(self._held)
            self._arguments.append(_quoted(self._held[:final])[1:-1])
            self._held = self._held[final:]
        return False


def _final_length(text: str) -> int:
    """Characters of a value that come before whatever may be the beginning of its closing tag."""
    for closing in ("\n" + _PARAMETER_END, _PARAMETER_END):
        for length in range(min(len(closing) - 1, len(text)), 0, -1):
            if text.endswith(closing[:length]):
                return len(text) - length
    return len(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
