"""The text of an output as its parsers read it: piece by piece, with a bound on what is held back.

A parser is a generator that yields where it needs more text. It decides by the text alone, never by where the
text was cut: whatever could still be read in two ways is held back.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
# Yields where more text is needed; returns what was read.
Reading = Generator[None, None, T]
BLANK = " \t\r\n"
# Characters of white space that are held back at most, for what may follow them.
MOST_BLANK = 1024
BLANKS = re.compile(r"[ \t\r\n]*")


def run_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Returns the end of a pattern's match from an index on; the index where there is none."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


class HeldText:
    """The text that has come and was not taken yet. `text[at:]` is next; `ended`: no more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        # Characters that were dropped before `text`.
        self._dropped = 0
        self._kept: int | None = None

    @property
    def position(self) -> int:
        """The place of `at`, in characters from the beginning of the output."""
        return self._dropped + self.at

    def add(self, more: str) -> None:
        """Appends text of the output."""
        drop = self.at if self._kept is None else self._kept - self._dropped
        self.text = self.text[drop:] + more
        self.at -= drop
        self._dropped += drop

    def take(self, end: int) -> str:
        """The text up to an index of `text`, which is read then."""
        taken, self.at = self.text[self.at : end], end
        return taken

    def keep(self) -> None:
        """Keeps the text from here on, until `release`."""
        self._kept = self.position

    def release(self) -> None:
        """Drops the place that `keep` set: text that was read is not needed any more."""
        self._kept = None

    def rewind(self) -> None:
        """Goes back to where `keep` was called."""
        assert self._kept is not None
        self.go_to(self._kept)

    def go_to(self, position: int) -> None:
        """Goes to a position behind which all text is kept."""
        self.at = position - self._dropped

    @property
    def kept(self) -> int:
        """The number of characters that were read since `keep`."""
        return 0 if self._kept is None else self.position - self._kept

    def since(self, position: int) -> str:
        """The text from a position on up to here. It must have been kept."""
        return self.text[position - self._dropped : self.at]

    def since_keep(self) -> str:
        """The text since `keep` up to here."""
        return self.text[self.at - self.kept : self.at]

    def skip_blank(self) -> None:
        """Reads white space, as far as the text goes."""
        self.at = run_end(BLANKS, self.text, self.at)

    def unread(self) -> str:
        """The text that was not passed on: what is kept, or was not read."""
        return self.text[(self.position if self._kept is None else self._kept) - self._dropped :]


class Markers:
    """Looks for the first of several markers."""

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._begun = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
        self._longest = max(map(len, markers))

    def find(self, text: str, at: int) -> tuple[int, re.Match[str] | None]:
        """Searches like `search`, but ends before the white space in front of a marker, which belongs to
        it."""
        end, found = self.search(text, at)
        first = max(at, end - MOST_BLANK)
        return first + len(text[first:end].rstrip(BLANK)), found

    def search(self, text: str, at: int) -> tuple[int, re.Match[str] | None]:
        """Returns the end of the text that is surely before any marker, and the marker, if there is one."""
        found = self._pattern.search(text, at)
        return (self.begins(text, at) if found is None else found.start()), found

    def begins(self, text: str, at: int) -> int:
        """Returns the beginning of what more text may make a marker; the text's end where there is none."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._begun:
                return start
        return len(text)
