"""Shared parts of the readers of single calls, however the calls are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from services.router.tools.held_text import HeldText, Reading
from services.router.tools.json_scanner import JsonScanner
from services.router.tools.parameter_types import ParameterTypes
from services.router.tools.pieces import FoundPieces

# The tools that may be called: their names, and the types of their parameters.
Tools = Mapping[str, ParameterTypes]
LONGEST_NAME = 64
# Characters from a call's opening up to where its name is known and its arguments have begun.
MOST_HEAD = 64 * 1024


class NotACallError(ValueError):
    """The text is no call: its name is no tool's, its arguments are no object, or it breaks before them."""


class CallReader(Protocol):
    """Reads one call of a tool from an output's text."""

    def read(self) -> Reading[bool]:
        """Reads a call where the text is, and passes it on from where its name is a tool's and its arguments
        have begun. Raises NotACallError before that; afterwards the call ends where its text breaks, which
        is returned as False."""
        ...


def more(held: HeldText) -> Reading[None]:
    """Waits for more of a call's head. Raises NotACallError where none will come, or it is too long."""
    check_head(held)
    if held.ended:
        raise NotACallError
    yield


def check_head(held: HeldText) -> None:
    """Raises NotACallError for a head that is too long."""
    if held.kept > MOST_HEAD:
        raise NotACallError


def next_character(held: HeldText) -> Reading[str]:
    """The next character of a call's head that is no white space, which is read."""
    while True:
        held.skip_blank()
        check_head(held)
        if held.at < len(held.text):
            return held.text[held.at]
        yield from more(held)


def next_is(held: HeldText, marker: str) -> Reading[bool]:
    """Reads white space of a call's head; True where a marker is next."""
    while True:
        yield from next_character(held)
        if held.text.startswith(marker, held.at):
            return True
        if not marker.startswith(held.text[held.at :]):
            return False
        yield from more(held)


def json_value(held: HeldText) -> Reading[str]:
    """Reads a JSON value of a call's head; returns its text. Raises NotACallError if it is none."""
    scanner, begin = JsonScanner(), held.position
    while True:
        held.at = scanner.scan(held.text, held.at, last=held.ended)
        check_head(held)
        if scanner.ended:
            return held.since(begin)
        if scanner.broken:
            raise NotACallError
        yield from more(held)


def stream_arguments(held: HeldText, found: FoundPieces) -> Reading[bool]:
    """Passes on the arguments, a JSON object, up to its end, or to where it breaks, which is False."""
    scanner = JsonScanner()
    held.release()
    while True:
        found.arguments(held.take(scanner.scan(held.text, held.at)))
        if scanner.ended:
            found.end()
            return True
        if scanner.broken:
            return False
        if held.ended:  # the output was cut off
            found.arguments(held.take(len(held.text)))
            return False
        yield
