"""Reads one call that is written as a name and a JSON object: `name[ARGS]{…}`.

An id may stand between them (`name[CALL_ID]…[ARGS]{…}`); it is not the call's, since the conversation's are
given out by the router. Tokenizers that leave out special tokens write `name{…}`.
"""

from __future__ import annotations

import re

from services.router.tools.call_reader import (
    LONGEST_NAME,
    NotACallError,
    Tools,
    check_head,
    json_value,
    more,
    next_character,
    next_is,
    stream_arguments,
)
from services.router.tools.held_text import HeldText, Reading, run_end
from services.router.tools.pieces import FoundPieces

ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_ID = re.compile(r"[^\[{]*")


class NamedCall:
    """A CallReader. The text is at the name."""

    def __init__(self, held: HeldText, tools: Tools, found: FoundPieces, opening: str) -> None:
        """`opening`: of the next call."""
        self._held = held
        self._tools = tools
        self._found = found
        self._opening = opening

    def read(self) -> Reading[bool]:
        """Reads a call that is a name and a JSON object, as `CallReader` says."""
        held, found = self._held, self._found
        name = yield from self._word(_NAME)
        if name not in self._tools:
            raise NotACallError
        if (yield from next_is(held, CALL_ID)):
            held.at += len(CALL_ID)
            yield from self._word(_ID)
        marked = yield from next_is(held, ARGUMENTS)
        if marked:
            held.at += len(ARGUMENTS)
        if (yield from next_character(held)) == "{":
            found.begin(name)
            return (yield from stream_arguments(held, found))
        # A tool without parameters.
        nothing = marked and (yield from next_is(held, self._opening))
        if not nothing and (yield from json_value(held)).strip() != "null":
            raise NotACallError
        found.whole(name, "{}")
        return True

    def _word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads what a pattern matches, which is as long as a name at most."""
        held = self._held
        while True:
            end = run_end(pattern, held.text, held.at)
            if end - held.at > LONGEST_NAME:
                raise NotACallError
            if end < len(held.text):
                word = held.take(end)
                check_head(held)
                return word
            yield from more(held)
