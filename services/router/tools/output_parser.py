"""Parses an output's text into content, reasoning and calls, as a request's `OutputStructure` says."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.tools.call_parser import CallParser
from services.router.tools.families import ToolFamily
from services.router.tools.pieces import Content, Piece
from services.router.tools.reasoning import ReasoningParser
from services.router.tools.scanner import Tools


@dataclass(frozen=True)
class OutputStructure:
    """What is looked for in an output. `family`: how its calls are written; None: it has none. `tools`:
    those that may be called. `reasoning`: whether it may begin with reasoning, `within`: whether the prompt
    has opened it. `kept_ids`: special tokens that are part of the text, since markers are spelt with them.
    """

    family: ToolFamily | None = None
    tools: Tools = field(default_factory=dict)
    reasoning: bool = False
    within: bool = False
    kept_ids: frozenset[int] = frozenset()


class OutputParser:
    """`push` an output's text in order; the pieces that are final are returned, the rest with the last
    text."""

    def __init__(self, structure: OutputStructure) -> None:
        self._calls = CallParser(structure.family, structure.tools) if structure.family is not None else None
        self._reasoning = ReasoningParser(within=structure.within) if structure.reasoning else None

    @property
    def calls(self) -> int:
        """How many calls were found."""
        return 0 if self._calls is None else self._calls.calls

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """`last`: the output has ended."""
        pieces: list[Piece] = [Content(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.push(text)
            if last:
                pieces += self._reasoning.finish()
        if self._calls is None:
            return pieces
        parsed: list[Piece] = []
        for piece in pieces:
            parsed += self._calls.push(piece.text) if isinstance(piece, Content) else [piece]
        return parsed + self._calls.finish() if last else parsed
