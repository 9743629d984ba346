"""Incremental detokenisation that never splits a character.

Each step decodes a small window of ids: some context, then the ids whose text is not final. Text that ends in
U+FFFD may still become a character. A character has at most four bytes, so at most the last three replacement
characters are held back. The window is cut whenever all text is final, and at the latest after `_LONGEST`
ids, so the cost of a token is bounded.

With a byte-level tokenizer the deltas concatenate to exactly the decoding of all ids at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# Most bytes that a character has before its last one.
_HELD = 3
# A longer window is cut to its last `_KEPT` ids. They have more than 3 + 9 bytes: the most that a partial
# character before them can affect, and the most that the held replacement characters stand for.
_LONGEST = 32
_KEPT = 16
# Ids of the prompt that are the context of the output's first ids.
_PROMPT_CONTEXT = 6


class Detokenizer:
    """Decodes one output: `push` ids in order, then `flush` once.

    `special_ids` are omitted from the text (skip_special_tokens).
    """

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int] = frozenset(), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        context = [token for token in prompt[-_PROMPT_CONTEXT:] if token not in special_ids]
        text = self._decode(context)
        if text.endswith(_REPLACEMENT):  # the prompt ends within a character, which is not part of the output
            context, text = [], ""
        # The window is the context and the ids whose text is not final. `_text` is its text, `_emitted` the
        # length of the part that was returned, including the context's text.
        self._window = context
        self._context = len(context)
        self._text = text
        self._emitted = len(text)

    def push(self, token_id: int) -> str:
        """The text that is final with this token; empty within a character."""
        if token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if self._context and self._text.endswith(_REPLACEMENT):
            self._leave_context()
        final = len(self._text) - _trailing_replacements(self._text)
        delta = self._text[self._emitted : final]
        self._emitted = max(self._emitted, final)
        self._cut(bool(delta))
        return delta

    def flush(self) -> str:
        """The text that was held back for a character that was not completed."""
        delta = self._text[self._emitted :]
        self._emitted = len(self._text)
        return delta

    def _decode(self, ids: list[int]) -> str:
        if len(ids) == 1:  # a window that was cut, with almost every token
            return _text_of(self._tokenizer, ids[0])
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _leave_context(self) -> None:
        """Drops the context when a character begins. A decoder with byte fallback decodes a run of bytes as a
        whole, and the bytes before it belong to another character. Nothing after the context was returned
        yet."""
        self._window = self._window[self._context :]
        self._context = 0
        self._text = self._decode(self._window)
        self._emitted = 0

    def _cut(self, progressed: bool) -> None:
        """Drops ids that the window no longer needs. Text that was not returned stays at its end."""
        if progressed and self._emitted == len(self._text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._text = self._decode(self._window)
            self._emitted = len(self._text)
        elif len(self._window) > _LONGEST:
            pending = len(self._text) - self._emitted
            self._window = self._window[-_KEPT:]
            self._context = 0
            self._text = self._decode(self._window)
            self._emitted = max(0, len(self._text) - pending)


@lru_cache(maxsize=16_384)
def _text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token alone."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return text


def _trailing_replacements(text: str) -> int:
    return min(_HELD, len(text) - len(text.rstrip(_REPLACEMENT)))
