"""Cuts a text at its first stop string.

Text that may become a stop string is held back. The match that is completed first counts, and the longest of
those that are completed by the same character; so the cut does not depend on how the text is divided into
tokens.

The strings are found with an Aho-Corasick automaton ("Efficient string matching", CACM 18/6, 1975). Its nodes
are the prefixes of the stop strings, numbered depth first. The state after a text is the longest prefix with
which the text ends. A character costs amortised constant time, whatever the number and length of the strings.
Most nodes have one child, which has the next number, so a node takes a few bytes: a request has up to 16
strings of 1,024 characters.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.base.bounded_cache import BoundedCache

_NO_CHILD = ""  # which no character equals
ROOT = 0
# What automatons that are kept for the next request with the same strings may take together; of each: bytes
# besides its characters, and of a character, as measured.
_KEPT_BYTES = 8 << 20
_AUTOMATON_BYTES = 2048
_CHARACTER_BYTES = 100


class StopAutomaton:
    """Immutable, so that outputs can share one; each keeps its own state."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: at least one string, none of them empty."""
        # The character of the edge from node i to node i + 1, if there is one.
        self._labels: list[str] = [_NO_CHILD]
        # All other edges, by node: at most one for each string.
        self._branches: dict[int, dict[str, int]] = {}
        # The length of a node's prefix.
        self.depth = array("H", [0])
        # The length of the longest stop string with which a text in this state ends, or 0.
        self.matched = array("H", [0])
        for stop in stops:
            self._add(stop)
        self._fail = array("I", [ROOT] * len(self._labels))
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        labels, branches, fail = self._labels, self._branches, self._fail
        while True:
            if labels[state] == character:
                return state + 1
            if state in branches and (child := branches[state].get(character)) is not None:
                return child
            if state == ROOT:
                return ROOT
            state = fail[state]

    def _child(self, node: int, character: str) -> int | None:
        if self._labels[node] == character:
            return node + 1
        return self._branches.get(node, {}).get(character)

    def _add(self, stop: str) -> None:
        node = ROOT
        for character in stop:
            child = self._child(node, character)
            node = self._grow(node, character) if child is None else child
        self.matched[node] = len(stop)

    def _grow(self, parent: int, character: str) -> int:
        child = len(self._labels)
        if child == parent + 1:
            self._labels[parent] = character
        else:
            self._branches.setdefault(parent, {})[character] = child
        self._labels.append(_NO_CHILD)
        self.depth.append(self.depth[parent] + 1)
        self.matched.append(0)
        return child

    def _link(self) -> None:
        """Sets the failure links level by level. Each leads to the longest other prefix with which the node's
        prefix ends. A node matches if its prefix ends with a stop string."""
        level = [child for _, child in self._children(ROOT)]
        while level:
            following = []
            for node in level:
                for character, child in self._children(node):
                    fail = self.step(self._fail[node], character)
                    self._fail[child] = fail
                    self.matched[child] = self.matched[child] or self.matched[fail]
                    following.append(child)
            level = following

    def _children(self, node: int) -> list[tuple[str, int]]:
        found = list(self._branches.get(node, {}).items())
        return [(self._labels[node], node + 1), *found] if self._labels[node] else found


def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings, cached: the outputs of a request share one, clients repeat theirs."""
    if (known := _automatons.get(stops)) is None:
        known = StopAutomaton(stops)
        _automatons.put(stops, known)
    return known


def _automaton_bytes(stops: tuple[str, ...], automaton: StopAutomaton) -> int:
    return _AUTOMATON_BYTES + _CHARACTER_BYTES * sum(map(len, stops))


_automatons = BoundedCache[tuple[str, ...], StopAutomaton](_KEPT_BYTES, _automaton_bytes)


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
