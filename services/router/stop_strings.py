"""Ends a text at the first stop string that completes in it.

Text that may yet become a stop string is held back. The match that completes first counts, the
longest of those that complete at the same character; so the cut does not depend on how the text
was divided into tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Watches one output for `stops`; `stopped` once one of them was seen."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now surely part of the output; nothing more after a match."""
        if self.stopped or not text:
            return ""
        if not self._stops:
            return text
        # What is held is a beginning of a stop string, so every match lies within held + text.
        pending = self._held + text
        start = self._match(pending)
        if start is not None:
            self.stopped = True
            self._held = ""
            return pending[:start]
        held = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> int | None:
        """Where the text is to be cut, if a stop string completes in it."""
        found = ((text.find(stop), len(stop)) for stop in self._stops)
        ends = [(start + length, start) for start, length in found if start >= 0]
        return min(ends)[1] if ends else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
