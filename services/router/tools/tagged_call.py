"""Reads one call that is written as tags: `<function=name><parameter=key>value</parameter>…</function>`.

Its arguments become a JSON object, each value of the type that the tool's schema gives it. Text is passed on
as it is written; values of other types when they are complete. A value ends at the next tag of the format,
since models leave closing tags out. One line break behind a parameter's opening tag and one before the tag
that ends it belong to the tags.
"""

from __future__ import annotations

from services.router.tools.call_reader import LONGEST_NAME, NotACallError, Tools, more, next_character
from services.router.tools.held_text import BLANK, HeldText, Markers, Reading
from services.router.tools.parameter_types import STRING, UNKNOWN, ParameterValue, Types, quoted
from services.router.tools.pieces import FoundPieces

FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_LONGEST_KEY = 1024


class TaggedCall:
    """A CallReader. The text is at the function's tag."""

    def __init__(self, held: HeldText, tools: Tools, found: FoundPieces, around: tuple[str, str]) -> None:
        """`around`: the tags around a call, which end it as well."""
        self._held = held
        self._tools = tools
        self._found = found
        self._ends = (_FUNCTION_END, FUNCTION, *around)
        self._markers = Markers(*self._ends, _PARAMETER, _PARAMETER_END)

    def read(self) -> Reading[bool]:
        """Reads a call that is written in tags, as `CallReader` says."""
        held, found = self._held, self._found
        name = yield from self._name_of_tag(FUNCTION, LONGEST_NAME)
        if name not in self._tools:
            raise NotACallError
        tag, key = yield from self._next_tag()
        found.begin(name)
        separator = "{"
        while tag == _PARAMETER:
            found.arguments(f"{separator}{quoted(key)}: ")
            separator = ", "
            held.release()
            if not (yield from self._value(self._tools[name].get(key, UNKNOWN))):
                return False
            held.keep()
            try:
                tag, key = yield from self._next_tag()
            except NotACallError:  # what follows is text
                held.rewind()
                return False
        found.arguments("{}" if separator == "{" else "}")
        found.end()
        if tag == _FUNCTION_END:
            held.at += len(tag)
        return True

    def _next_tag(self) -> Reading[tuple[str, str]]:
        """The next tag, and the key of a parameter's, which is read; the others end the call."""
        held = self._held
        while True:
            yield from next_character(held)
            if held.text.startswith(_PARAMETER, held.at):
                return _PARAMETER, (yield from self._name_of_tag(_PARAMETER, _LONGEST_KEY))
            for tag in self._ends:
                if held.text.startswith(tag, held.at):
                    return tag, ""
            if self._markers.begins(held.text, held.at) != held.at:
                raise NotACallError
            yield from more(held)

    def _name_of_tag(self, opening: str, longest: int) -> Reading[str]:
        """Reads a tag; what it names."""
        held = self._held
        held.at += len(opening)
        while True:
            end = held.text.find(">", held.at, held.at + longest + 1)
            if end >= 0:
                name = held.take(end).strip(BLANK)
                held.at += 1
                if "<" in name:
                    raise NotACallError
                return name
            if len(held.text) - held.at > longest:
                raise NotACallError
            yield from more(held)

    def _value(self, types: Types) -> Reading[bool]:
        """Passes on a value up to the tag that ends it, and reads the tag if it closes the value; False where
        the output ends before."""
        held, found = self._held, self._found
        value = ParameterValue(types)
        while held.at == len(held.text) and not held.ended:
            yield
        if held.text.startswith("\n", held.at):
            held.at += 1
        if types == STRING:
            found.arguments('"')
        while True:
            end, tag = self._markers.search(held.text, held.at)
            text = held.take(end - held.text.endswith("\n", held.at, end))
            if types == STRING:
                found.arguments(quoted(text)[1:-1])
            else:
                value.add(text)
            if tag is not None:
                found.arguments('"' if types == STRING else value.json())
                held.at = tag.end() if tag.group() == _PARAMETER_END else tag.start()
                return True
            if held.ended:
                held.at = len(held.text)
                return False
            yield
