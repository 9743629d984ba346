"""Separates reasoning from the text behind it: `<think>…</think>`, as DeepSeek R1, Qwen3 and QwQ write it."""

from __future__ import annotations

from enum import Enum, auto

from services.router.tools.markers import BLANK, final_length
from services.router.tools.pieces import Content, Piece, Reasoning

OPEN, CLOSE = "<think>", "</think>"


def has_reasoning(template: str | None) -> bool:
    """Whether a chat template marks reasoning."""
    return template is not None and CLOSE in template


def begins_within(prompt_end: str) -> bool:
    """Whether the output continues reasoning that the end of the prompt has opened."""
    return prompt_end.rstrip(BLANK).endswith(OPEN)


class _At(Enum):
    BEGIN = auto()  # nothing but white space came
    OPENED = auto()  # behind the opening marker
    REASONING = auto()
    CLOSED = auto()  # behind the closing marker
    CONTENT = auto()


class ReasoningParser:
    """`push` the text in order, then `finish` once. Only reasoning that the output begins with counts; white
    space around the markers is left out."""

    def __init__(self, *, within: bool) -> None:
        """`within`: the prompt has opened it."""
        self._held = ""
        self._at = _At.OPENED if within else _At.BEGIN

    def push(self, text: str) -> list[Piece]:
        """The pieces that are final with this text."""
        self._held += text
        pieces: list[Piece] = []
        if self._at is _At.BEGIN:
            self._begin()
        if self._at is _At.OPENED:
            self._skip_blank(_At.REASONING)
        if self._at is _At.REASONING:
            self._reason(pieces)
        if self._at is _At.CLOSED:
            self._skip_blank(_At.CONTENT)
        if self._at is _At.CONTENT and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        """The text that was held back, once no more will come."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._at is _At.REASONING else Content(held)]

    def _begin(self) -> None:
        begin = self._held.lstrip(BLANK)
        if begin.startswith(OPEN):
            self._held, self._at = begin.removeprefix(OPEN), _At.OPENED
        elif not OPEN.startswith(begin):
            self._at = _At.CONTENT

    def _skip_blank(self, behind: _At) -> None:
        self._held = self._held.lstrip(BLANK)
        if self._held:
            self._at = behind

    def _reason(self, pieces: list[Piece]) -> None:
        text, found, after = self._held.partition(CLOSE)
        if found:
            text, self._held, self._at = text.rstrip(BLANK), after, _At.CLOSED
        else:
            final = final_length(self._held, CLOSE)
            text, self._held = self._held[:final], self._held[final:]
        if text:
            pieces.append(Reasoning(text))
