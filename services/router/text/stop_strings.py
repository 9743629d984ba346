"""Cuts a text at its first stop string.

Text that may become a stop string is held back. The match that is completed first counts, and the longest of
those that are completed by the same character; so the cut does not depend on how the text is divided into
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.router.text.stop_automaton import ROOT, automaton_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in one output; `stopped` once one was completed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = automaton_of(tuple(stops)) if stops else None
        self._state = ROOT
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certainly part of the output; empty after a match."""
        if self.stopped or not text:
            return ""
        if self._automaton is None:
            return text
        step, matched, state = self._automaton.step, self._automaton.matched, self._state
        # The held text is a prefix of a stop string, so every match is within held + text.
        pending, seen = self._held + text, len(self._held)
        for character in text:
            state = step(state, character)
            seen += 1
            if matched[state]:
                self.stopped = True
                self._held = ""
                return pending[: seen - matched[state]]
        self._state = state
        certain = seen - self._automaton.depth[state]
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """The text that was held back for a stop string that was not completed."""
        held, self._held = self._held, ""
        return held
