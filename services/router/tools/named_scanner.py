"""Reads one call that is written as a name and a JSON object: `name[ARGS]{…}`.

An id may stand between them (`name[CALL_ID]…[ARGS]{…}`); it is not the call's, since the conversation's are
given out by the router. Tokenizers that leave out special tokens write `name{…}`.
"""

from __future__ import annotations

import re

from services.router.tools.markers import BLANK
from services.router.tools.nesting import Nesting
from services.router.tools.scanner import LONGEST_NAME, MalformedCallError, Tools

ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class NamedScanner:
    """A Scanner. `tools`: those that may be called."""

    def __init__(self, tools: Tools) -> None:
        self.raw = ""
        self.name: str | None = None
        self.ended = False
        self._tools = tools
        self._head = ""  # what is read before the object
        self._nesting = Nesting()
        self._within = False  # the object has begun
        self._arguments: list[str] = []

    def push(self, text: str) -> str:
        """Takes text up to the object's end; the rest. Raises MalformedCallError."""
        before = self.raw
        if self.name is None:
            self.raw += text
        if not self._within:
            self._head += text
            try:
                self._take_head()
            except MalformedCallError:
                self.raw = before
                raise
            if not self._within:
                return ""
            text, self._head = self._head, ""
        return self._take_object(text)

    def take_arguments(self) -> str:
        """The text of the arguments that came since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _take_head(self) -> None:
        """Reads up to the object's brace, as far as the text goes."""
        if self.name is None:
            match = _NAME.match(self._head)
            name = match.group() if match else ""
            if len(name) > LONGEST_NAME:
                raise MalformedCallError
            if name == self._head:
                return
            if name not in self._tools:
                raise MalformedCallError
            self.name, self._head = name, self._head[len(name) :]
        while head := self._head.lstrip(BLANK):
            if head[0] == "{":
                self._head, self._within = head, True
                return
            if head.startswith(ARGUMENTS):
                self._head = head.removeprefix(ARGUMENTS)
            elif head.startswith(CALL_ID):
                end = re.compile(r"[\[{]").search(head, len(CALL_ID))
                if end is None and len(head) <= len(CALL_ID) + LONGEST_NAME:
                    return
                if end is None:
                    raise MalformedCallError(head)
                self._head = head[end.start() :]
            elif ARGUMENTS.startswith(head) or CALL_ID.startswith(head):
                return
            else:
                raise MalformedCallError(head)

    def _take_object(self, text: str) -> str:
        for place, character in enumerate(text):
            self._nesting.take(character)
            if not self._nesting.open:
                self.ended = True
                self._arguments.append(text[: place + 1])
                return text[place + 1 :]
        self._arguments.append(text)
        return ""
