"""Finds the tool calls in an output's text while it is being written.

    text ─▶ opening ─▶ a call ─▶ separator or closing ─▶ a call, or text

Text is held back while it may be the beginning of a marker, and white space before it while a call may
follow. What looks like a call and is none becomes text again.
"""

from __future__ import annotations

import secrets
import string
from enum import Enum, auto

from services.router.tools.call_scanner import CallScanner
from services.router.tools.families import Syntax, ToolFamily
from services.router.tools.markers import BLANK, final_length
from services.router.tools.named_scanner import NamedScanner
from services.router.tools.pieces import CallArguments, CallBegin, Content, Piece
from services.router.tools.scanner import MalformedCallError, Scanner, Tools
from services.router.tools.xml_scanner import FUNCTION, XmlScanner

_ID_CHARACTERS = string.ascii_letters + string.digits


class _In(Enum):
    TEXT = auto()
    OPENED = auto()  # behind the opening, or a separator
    CALL = auto()
    CALLED = auto()  # behind a call


class CallParser:
    """`push` the text in order, then `finish` once."""

    def __init__(self, family: ToolFamily, tools: Tools) -> None:
        """A call of none of the tools is text."""
        self._family = family
        self._form = family  # how the calls behind this opening are written
        self._tools = tools
        # A list of calls is opened by its marker and a bracket, which may be apart.
        self._opening = family.opening.rstrip(BLANK + "[")
        self._in = _In.TEXT
        self._held = ""
        self._before = ""  # what the call that is read was opened by
        self._scanner: Scanner = CallScanner(tools)
        self._begun = False  # whether the call that is read was passed on
        self._calls = 0
        self._text_came = False

    @property
    def calls(self) -> int:
        """How many calls were found."""
        return self._calls

    def push(self, text: str) -> list[Piece]:
        """The pieces that are final with this text."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The text that was held back, once no more will come."""
        pieces: list[Piece] = []
        if self._in is _In.CALL and not self._begun:
            self._text(self._before + self._scanner.raw, pieces)
        elif self._in in (_In.TEXT, _In.OPENED) and (self._held.strip() or not self._calls):
            self._text(self._held, pieces)
        self._held = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Takes some of the held text; False where more is needed."""
        match self._in:
            case _In.TEXT:
                return self._in_text(pieces)
            case _In.OPENED:
                return self._opened(pieces)
            case _In.CALL:
                return self._in_call(pieces)
            case _In.CALLED:
                return self._called(pieces)

    def _in_text(self, pieces: list[Piece]) -> bool:
        if not self._opening:
            return self._without_opening(pieces)
        before, found, after = self._held.partition(self._opening)
        if self._family.syntax is Syntax.TAGS and FUNCTION in before:
            # Models of this family leave out what is around a call now and then.
            before, found, after = before.partition(FUNCTION)[0], "", self._held[before.index(FUNCTION) :]
        if found or after:
            text = before.rstrip(BLANK)
            self._text(text, pieces)
            self._before = before.removeprefix(text) + found
            self._held, self._in, self._form = after, _In.OPENED, self._family
            return True
        final = final_length(self._held, self._opening)
        if self._family.syntax is Syntax.TAGS:
            final = min(final, final_length(self._held, FUNCTION))
        self._text(self._held[:final], pieces)
        self._held = self._held[final:]
        return False

    def _without_opening(self, pieces: list[Piece]) -> bool:
        """An output that begins with a brace is a call."""
        if self._text_came:
            self._text(self._held, pieces)
            self._held = ""
            return False
        rest = self._held.lstrip(BLANK)
        ignored = self._family.ignored
        if ignored and rest.startswith(ignored):
            self._held = rest.removeprefix(ignored)
            return True
        if not rest or (ignored and ignored.startswith(rest)):
            return False
        if rest[0] == "{":
            self._held, self._in = rest, _In.OPENED
        else:
            self._text_came = True
        return True

    def _opened(self, pieces: list[Piece]) -> bool:
        rest = self._held.lstrip(BLANK)
        if not rest:
            return False
        if self._form.older is not None and rest[0] in "[{":  # no name begins so
            self._form = self._form.older
        in_list = self._form.opening.endswith("[")
        if in_list and rest[0] in "[,":
            self._before += self._held[: -len(rest)] + rest[0]
            self._held = rest[1:]
        elif in_list and rest[0] == "]":
            self._held, self._in = rest[1:], _In.TEXT
        elif (scanner := self._scanner_of(rest[0])) is not None:
            self._held, self._in = rest, _In.CALL
            self._scanner, self._begun = scanner, False
        else:
            self._text(self._before + self._held, pieces)
            self._held, self._in = "", _In.TEXT
        return True

    def _scanner_of(self, first: str) -> Scanner | None:
        """What reads a call that begins so; None: it is none."""
        match self._form.syntax:
            case Syntax.NAMED:
                return NamedScanner(self._tools)
            case Syntax.TAGS if first == "<":
                return XmlScanner(self._tools)
            case _:
                return CallScanner(self._tools) if first == "{" else None

    def _in_call(self, pieces: list[Piece]) -> bool:
        if not self._held:
            return False
        scanner, text = self._scanner, self._held
        try:
            self._held = scanner.push(text)
        except MalformedCallError as error:
            self._pass_on(pieces)
            # What was read is text, but for what was passed on.
            rest = error.rest if self._begun else self._before + scanner.raw + text
            self._text(rest, pieces)
            self._held, self._in = "", _In.TEXT
            return False
        self._pass_on(pieces)
        if scanner.ended:
            self._in = _In.CALLED
        return True

    def _pass_on(self, pieces: list[Piece]) -> None:
        """Passes on what is known of the call."""
        if self._scanner.name is None:
            return
        if not self._begun:
            self._begun = True
            pieces.append(CallBegin(self._calls, self._new_id(), self._scanner.name))
            self._calls += 1
        if more := self._scanner.take_arguments():
            pieces.append(CallArguments(self._calls - 1, more))

    def _called(self, pieces: list[Piece]) -> bool:
        rest = self._held.lstrip(BLANK)
        closing, separator = self._form.closing.strip(), self._form.separator.strip()
        if not rest or (closing and closing != rest and closing.startswith(rest)):
            return False
        if closing and rest.startswith(closing):
            self._held, self._in = rest.removeprefix(closing), _In.TEXT
        elif self._form.syntax is Syntax.JSON and rest[0] == (separator or "{"):
            self._held, self._in = rest.removeprefix(separator), _In.OPENED
            self._before = ""  # belongs to the call that has ended
        else:
            self._in, self._text_came = _In.TEXT, True
        return True

    def _text(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._text_came = True
            pieces.append(Content(text))

    def _new_id(self) -> str:
        if self._family.short_ids:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
