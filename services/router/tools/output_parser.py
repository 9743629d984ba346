"""Parses an output's text into content, reasoning and calls, as a request's `OutputStructure` says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.router.tools.call_parser import CallParser
from services.router.tools.call_reader import Tools
from services.router.tools.families import ToolFamily
from services.router.tools.pieces import Content, Piece
from services.router.tools.reasoning import ReasoningParser


@dataclass(frozen=True)
class OutputStructure:
    """Says what to look for in an output. `family`: how its calls are written; None: it has none. `tools`:
    those that may be called. `reasoning`: whether it may begin with reasoning, `within`: whether the prompt
    has opened it. `kept_ids`: special tokens that are part of the text, since markers are spelt with them.
    `only_one`: calls behind the first are left out.
    """

    family: ToolFamily | None = None
    tools: Tools = field(default_factory=dict)
    reasoning: bool = False
    within: bool = False
    kept_ids: frozenset[int] = frozenset()
    only_one: bool = False


class OutputParser:
    """`push` an output's text in order; the pieces that are final are returned, the rest with the last
    text.

    `reasoning_tokens`: tokens whose text begins in reasoning, as far as that is known; None where there is no
    reasoning.
    """

    def __init__(self, structure: OutputStructure) -> None:
        family = structure.family
        self._calls = (
            None if family is None else CallParser(family, structure.tools, only_one=structure.only_one)
        )
        self._reasoning = ReasoningParser(within=structure.within) if structure.reasoning else None
        self.reasoning_tokens = 0 if structure.reasoning else None
        # Where the tokens begin of which that is not known yet.
        self._offsets: deque[int] = deque()

    @property
    def closed_calls(self) -> int:
        """The number of calls with whole arguments."""
        return 0 if self._calls is None else self._calls.closed

    def push(self, text: str, *, last: bool, offsets: Iterable[int] = ()) -> list[Piece]:
        """Parses more of the text. `last`: the output has ended. `offsets`: where in the output the text of
        each token begins."""
        pieces: list[Piece] = [Content(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.push(text)
            if last:
                pieces += self._reasoning.finish()
            self._count(self._reasoning, offsets)
        if self._calls is None:
            return pieces
        parsed: list[Piece] = []
        for piece in pieces:
            parsed += self._calls.push(piece.text) if isinstance(piece, Content) else [piece]
        return parsed + self._calls.finish() if last else parsed

    def _count(self, reasoning: ReasoningParser, offsets: Iterable[int]) -> None:
        """Counts the tokens that begin in what is known to be reasoning."""
        assert self.reasoning_tokens is not None
        waiting = self._offsets
        waiting.extend(offsets)
        while waiting and waiting[0] < reasoning.end:
            self.reasoning_tokens += waiting.popleft() >= reasoning.begin
        if reasoning.over:
            waiting.clear()
