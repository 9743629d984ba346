"""Ends a text at the first stop string that completes in it.

Text that may yet become a stop string is held back. The match that completes first counts, the
longest of those that complete at the same character; so the cut does not depend on how the text
was divided into tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.router.text.stop_automaton import ROOT, automaton_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Watches one output for `stops`; `stopped` once one of them was seen."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = automaton_of(tuple(stops)) if stops else None
        self._state = ROOT
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now surely part of the output; nothing more after a match."""
        if self.stopped or not text:
            return ""
        if self._automaton is None:
            return text
        step, matched, state = self._automaton.step, self._automaton.matched, self._state
        # What is held is a beginning of a stop string, so every match lies within held + text.
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
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
