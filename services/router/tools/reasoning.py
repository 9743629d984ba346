"""Separates reasoning from the text behind it: `<think>…</think>`, as DeepSeek R1, Qwen3 and QwQ write it."""

from __future__ import annotations

from services.router.tools.held_text import BLANK, MOST_BLANK, HeldText, Markers, Reading
from services.router.tools.pieces import Content, Piece, Reasoning

OPEN, CLOSE = "<think>", "</think>"
_CLOSINGS = Markers(CLOSE)


def has_reasoning(template: str | None) -> bool:
    """True if a chat template marks reasoning."""
    return template is not None and CLOSE in template


def begins_within(prompt_end: str) -> bool:
    """True if the output continues reasoning that the end of the prompt has opened."""
    return prompt_end.rstrip(BLANK).endswith(OPEN)


class ReasoningParser:
    """`push` the text in order, then `finish` once. Only reasoning that the output begins with counts; white
    space around the markers is left out.

    `begin` and `end` are positions in the output: the text between them is known to be reasoning. So far, and
    always where there is none, they are equal.
    """

    def __init__(self, *, within: bool) -> None:
        """`within`: the prompt has opened it."""
        self.begin = self.end = 0
        # Nothing that follows is reasoning.
        self.over = False
        self._held = HeldText()
        self._pieces: list[Piece] = []
        self._reading = self._read(within)

    def push(self, text: str) -> list[Piece]:
        """The pieces that are final with this text."""
        self._held.add(text)
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The text that was held back, once no more will come."""
        self._held.ended = True
        return self.push("")

    def _read(self, within: bool) -> Reading[None]:
        held = self._held
        if within or (yield from self._opened()):
            yield from self._skip_blank()
            yield from self._reason()
            self.over = True
            yield from self._skip_blank()
        self.over = True
        while True:
            if text := held.take(len(held.text)):
                self._pieces.append(Content(text))
            if held.ended:
                return
            yield

    def _opened(self) -> Reading[bool]:
        """Reads the opening marker; False where the output does not begin with it."""
        held = self._held
        while True:
            head = held.text[held.at : held.at + MOST_BLANK + len(OPEN)]
            begin = head.lstrip(BLANK)
            if begin.startswith(OPEN):
                held.at += len(head) - len(begin) + len(OPEN)
                self.begin = self.end = held.position
                return True
            if held.ended or len(head) == MOST_BLANK + len(OPEN) or not OPEN.startswith(begin):
                return False
            yield

    def _skip_blank(self) -> Reading[None]:
        held = self._held
        held.skip_blank()
        while held.at == len(held.text) and not held.ended:
            yield
            held.skip_blank()

    def _reason(self) -> Reading[None]:
        held, found = self._held, None
        while found is None:
            final, found = _CLOSINGS.find(held.text, held.at)
            if text := held.take(len(held.text) if found is None and held.ended else final):
                self._pieces.append(Reasoning(text))
            self.end = held.position
            if found is not None:
                held.at = found.start()
                self.end = held.position
                held.at = found.end()
            elif held.ended:
                return
            else:
                yield
