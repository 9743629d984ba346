"""The pieces that an output's text is made of."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Content:
    """Text of the answer, for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool; its arguments follow. `index`: its number among the output's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A further part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The arguments of a call are a whole JSON object. A call that breaks off has no end."""

    index: int


Piece = Content | Reasoning | CallBegin | CallArguments | CallEnd


class FoundPieces:
    """Collects the pieces that a parser finds. `begun` and `closed` count its calls; `read` counts those that
    are left out, too."""

    def __init__(self, *, short_ids: bool, only_one: bool) -> None:
        """`short_ids`: ids of calls have nine letters and digits. `only_one`: further calls are left out."""
        self.read = self.begun = self.closed = 0
        self._pieces: list[Piece] = []
        self._short_ids = short_ids
        self._only_one = only_one
        self._left_out = False

    def take(self) -> list[Piece]:
        """The pieces since the last call of this method."""
        taken, self._pieces = self._pieces, []
        return taken

    def content(self, text: str) -> None:
        """Adds text that is part of no call."""
        if text:
            self._pieces.append(Content(text))

    def begin(self, name: str) -> None:
        """Begins a call of this tool."""
        self.read += 1
        self._left_out = self._only_one and self.begun > 0
        if not self._left_out:
            self._pieces.append(CallBegin(self.begun, self._new_id(), name))
            self.begun += 1

    def arguments(self, text: str) -> None:
        """Adds a part of the current call's arguments."""
        if text and not self._left_out:
            self._pieces.append(CallArguments(self.begun - 1, text))

    def end(self) -> None:
        """Ends the current call, whose arguments are complete."""
        if not self._left_out:
            self._pieces.append(CallEnd(self.begun - 1))
            self.closed += 1

    def whole(self, name: str, arguments: str) -> None:
        """Adds a call whose arguments are known as a whole."""
        self.begin(name)
        self.arguments(arguments)
        self.end()

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
