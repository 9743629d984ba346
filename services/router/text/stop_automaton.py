"""Aho and Corasick's automaton of a request's stop strings ("Efficient string matching", CACM 18/6, 1975).

Nodes are the beginnings of the stop strings, numbered depth first; the state after a text is the longest
beginning that the text ends with. Each character costs amortised constant time, however many and however long
the strings are. All but a few nodes have one child, numbered next, so a node takes a few bytes: a request has
up to 16 strings of 1,024 characters.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_CHILD = ""  # which no character equals
ROOT = 0


class StopAutomaton:
    """Immutable after construction, so outputs share one; each keeps its own state."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty."""
        # The character that leads from node i to node i + 1, where one does.
        self._labels: list[str] = [_NO_CHILD]
        # Every other edge, by its node: at most one a string.
        self._branches: dict[int, dict[str, int]] = {}
        # How many characters a node stands for.
        self.depth = array("H", [0])
        # The length of the longest stop string that a text in this state ends with, or 0.
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
        """Sets the failure links level by level: each leads to the longest other beginning that the node's
        text ends with. A match completes wherever a node's text ends with a stop string."""
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


@lru_cache(maxsize=64)
def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings. Clients repeat theirs, and the outputs of one request share them."""
    return StopAutomaton(stops)
