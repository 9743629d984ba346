"""Finds the tool calls in an output's text while it is being written.

    text ─▶ opening ─▶ a call ─▶ separator or closing ─▶ a call, or text

The calls that are found depend on the text alone, neither on how it is cut nor on whether it comes as a
whole. Each call stands for itself. One is passed on from where its name is a tool's and its arguments have
begun; where it breaks before that, its opening is text and the search goes on behind it, and where it breaks
later, behind that place. White space before a call belongs to it; all else that is no call is content, as it
is.
"""

from __future__ import annotations

import re

from services.common.observability.logs import get_log
from services.router.tools.call_reader import CallReader, NotACallError, Tools, next_character, next_is
from services.router.tools.families import Syntax, ToolFamily
from services.router.tools.held_text import BLANK, MOST_BLANK, HeldText, Markers, Reading
from services.router.tools.json_call import JsonCall
from services.router.tools.json_scanner import JsonScanner
from services.router.tools.named_call import NamedCall
from services.router.tools.pieces import FoundPieces, Piece
from services.router.tools.tagged_call import FUNCTION, TaggedCall

_log = get_log("tools")
# White space that may stand between a separator and the next call, where a list is broken.
_MOST_BETWEEN = 16
_NEXT = rf"[,;\n][ \t\r\n]{{0,{_MOST_BETWEEN}}}"
_MAYBE_NEXT = re.compile(_NEXT + r"\Z")


class CallParser:
    """`push` the text in order, then `finish` once."""

    def __init__(self, family: ToolFamily, tools: Tools, *, only_one: bool = False) -> None:
        """A call of none of the tools is text. `only_one`: calls behind the first are left out."""
        self._family = family
        self._tools = tools
        self._held = HeldText()
        self._found = FoundPieces(short_ids=family.short_ids, only_one=only_one)
        # A list of calls is opened by its marker and a bracket, which may be apart.
        opening = family.opening.rstrip(BLANK + "[")
        more = (FUNCTION,) if family.syntax is Syntax.TAGS else ()
        self._openings = Markers(opening, *more) if opening else None
        # Where calls may begin again, behind one of a list that is broken.
        self._again = re.compile(_NEXT + r"(?=\{)" + (f"|{re.escape(opening)}" if opening else ""))
        self._opening = opening
        self._reading = self._read()

    @property
    def closed(self) -> int:
        """The number of calls with whole arguments."""
        return self._found.closed

    def push(self, text: str) -> list[Piece]:
        """The pieces that are final with this text."""
        self._held.add(text)
        self._go_on()
        return self._found.take()

    def finish(self) -> list[Piece]:
        """The text that was held back, once no more will come."""
        self._held.ended = True
        self._go_on()
        return self._found.take()

    def _go_on(self) -> None:
        """Reads as far as the text goes. An output is never lost to a fault of its parser: it is text."""
        try:
            next(self._reading, None)
        except Exception:
            _log.exception("tool_call_parser_failed", family=self._family.name)
            self._found.content(self._held.unread())
            self._held.at = len(self._held.text)
            self._reading = self._read_text()
            next(self._reading, None)

    def _read(self) -> Reading[None]:
        if self._openings is None:
            yield from self._read_beginning()
            yield from self._read_text()
            return
        while (opening := (yield from self._text_before(self._openings))) is not None:
            yield from self._behind(opening)

    def _text_before(self, openings: Markers) -> Reading[str | None]:
        """Passes on text up to an opening, which is read except for a function's tag; None where the output
        ends."""
        held = self._held
        held.release()
        while True:
            end, found = openings.find(held.text, held.at)
            self._found.content(held.take(end))
            if found is not None:
                held.keep()
                held.at = found.start() if found.group() == FUNCTION else found.end()
                return found.group()
            if held.ended:
                rest = held.take(len(held.text))
                if rest.strip(BLANK) or not self._found.begun:
                    self._found.content(rest)
                return None
            yield

    def _read_text(self) -> Reading[None]:
        """All of the rest is text."""
        held = self._held
        held.release()
        while True:
            self._found.content(held.take(len(held.text)))
            if held.ended:
                return
            yield

    def _read_beginning(self) -> Reading[None]:
        """Without openings, an output that begins with a brace is a list of calls."""
        held, ignored = self._held, self._family.ignored
        held.keep()
        try:
            if ignored and (yield from next_is(held, ignored)):
                held.at += len(ignored)
            if (yield from next_character(held)) == "{":
                yield from self._list(self._family, held.position)
                return
        except NotACallError:
            pass
        held.rewind()

    def _behind(self, opening: str) -> Reading[None]:
        """Reads one call or a list of them, behind its opening, which is text where there is none."""
        held = self._held
        behind = held.position + (len(FUNCTION) if opening == FUNCTION else 0)
        try:
            form = yield from self._form(opening)
            if form.syntax is Syntax.JSON:
                yield from self._list(form, behind)
            else:
                yield from self._reader(form).read()
                held.keep()
                yield from self._closing(form)
        except NotACallError:
            held.go_to(behind)
        self._found.content(held.since_keep())

    def _form(self, opening: str) -> Reading[ToolFamily]:
        """Reads up to the name or brace of a call behind the opening; the form in which it is written. Raises
        NotACallError."""
        held, family = self._held, self._family
        if opening == FUNCTION:
            return family
        first = yield from next_character(held)
        if family.older is not None and first in "[{":  # no name or tag begins so
            family = family.older
        if family.syntax is Syntax.TAGS and not (yield from next_is(held, FUNCTION)):
            raise NotACallError
        if family.syntax is Syntax.JSON:
            if first == "[" and family.opening.endswith("["):
                held.at += 1
                first = yield from next_character(held)
            if first != "{":
                raise NotACallError
        return family

    def _reader(self, form: ToolFamily) -> CallReader:
        match form.syntax:
            case Syntax.JSON:
                return JsonCall(self._held, self._tools, self._found)
            case Syntax.NAMED:
                return NamedCall(self._held, self._tools, self._found, self._opening)
            case Syntax.TAGS:
                around = form.opening.strip(), form.closing.strip()
                return TaggedCall(self._held, self._tools, self._found, around)

    def _list(self, form: ToolFamily, behind: int) -> Reading[None]:
        """Reads calls that are JSON objects and follow one another, from the brace of the first. `behind`:
        the position behind their opening."""
        held, before = self._held, self._found.read
        while True:
            brace = held.position
            try:
                whole = yield from self._reader(form).read()
                if not whole and not form.each:
                    yield from self._broken()
                held.keep()
            except NotACallError:
                if form.each:
                    held.go_to(behind)
                    return
                yield from self._no_call(brace)
            behind = held.position
            if self._found.read > before and (yield from self._closing(form)):
                return
            if not (yield from self._another()):
                return

    def _another(self) -> Reading[bool]:
        """Reads up to the brace of the next call of a list; False where none follows."""
        held = self._held
        while True:
            rest = held.text[held.at : held.at + MOST_BLANK + 1]
            if begin := rest.lstrip(BLANK + ",;"):
                if begin[0] == "{":
                    held.at += len(rest) - len(begin)
                return begin[0] == "{"
            if held.ended and self._found.begun and not rest.strip(BLANK):
                held.at += len(rest)  # white space at the output's end
                held.keep()
            if held.ended or len(rest) > MOST_BLANK:
                return False
            yield

    def _closing(self, form: ToolFamily) -> Reading[bool]:
        """Reads what closes calls, and brackets too many before it; False where it does not follow."""
        held, closing = self._held, form.closing.strip()
        most = MOST_BLANK + len(closing)
        while closing:
            rest = held.text[held.at : held.at + most]
            end = rest.lstrip((BLANK + "}]").replace(closing[0], ""))
            if end.startswith(closing):
                held.at += len(rest) - len(end) + len(closing)
                held.keep()
                return True
            if held.ended or len(rest) == most or not closing.startswith(end):
                break
            yield
        return False

    def _no_call(self, brace: int) -> Reading[None]:
        """Passes on as text what is kept, and the object of a list that begins at the brace."""
        held, scanner = self._held, JsonScanner()
        held.go_to(brace)
        self._found.content(held.since_keep())
        held.release()
        while True:
            self._found.content(held.take(scanner.scan(held.text, held.at, last=held.ended)))
            if scanner.ended or scanner.broken or held.ended:
                break
            yield
        if not scanner.ended:
            yield from self._broken()
        held.keep()

    def _broken(self) -> Reading[None]:
        """Passes on the text of a list that is broken here, up to where another call may begin."""
        held = self._held
        held.release()
        while True:
            found = self._again.search(held.text, held.at)
            if found is not None or held.ended:
                self._found.content(held.take(len(held.text) if found is None else found.start()))
                return
            self._found.content(held.take(self._maybe_again()))
            yield

    def _maybe_again(self) -> int:
        """Returns the index from which on calls may begin again, once more has come."""
        text, at = self._held.text, self._held.at
        found = _MAYBE_NEXT.search(text, max(at, len(text) - _MOST_BETWEEN - 1))
        begins = len(text) if self._openings is None else self._openings.begins(text, at)
        return begins if found is None else min(begins, found.start())
