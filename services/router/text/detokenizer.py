"""From token ids to text as they come, never splitting a character.

The decoder is asked for a small window of ids at a time: some context, then what is not yet
certain. Text ending in U+FFFD may still become a character, which has at most four bytes, so at
most the last three of them are held back; the window is cut whenever nothing is uncertain, and
at the latest after `_LONGEST` ids, so a token costs a bounded amount whatever the model emits.

Of a byte-level tokenizer the deltas concatenate to exactly the decoding of all ids at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# Bytes of a character that are not its last.
_HELD = 3
# A window this long is cut to its end. What is kept spans over 3 + 9 bytes: the most a partial
# character before it can disturb, and the most the held replacements stand for.
_LONGEST = 32
_KEPT = 16
# Ids of the prompt that the output's first ids are decoded after.
_PROMPT_CONTEXT = 6


class Detokenizer:
    """The text of one output; `push` ids in order, `flush` once at the end.

    `special_ids` are left out of the text, which is what skipping special tokens means.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int] = frozenset(), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        context = [token for token in prompt[-_PROMPT_CONTEXT:] if token not in special_ids]
        text = self._decode(context)
        if text.endswith(_REPLACEMENT):  # the prompt may end within a character: it is no part of ours
            context, text = [], ""
        # window = context + ids whose text is not all out; _text is its text, _shown how much of
        # that the client has (the context's text counts as shown).
        self._window = context
        self._context = len(context)
        self._text = text
        self._shown = len(text)

    def push(self, token_id: int) -> str:
        """The text that this token made certain; often empty within a character."""
        if token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        self._text = self._decode(self._window)
        if self._context and self._text.endswith(_REPLACEMENT):
            self._leave_context()
        certain = len(self._text) - _trailing_replacements(self._text)
        delta = self._text[self._shown : certain]
        self._shown = max(self._shown, certain)
        self._cut(bool(delta))
        return delta

    def flush(self) -> str:
        """What was held back for a character that did not come."""
        delta = self._text[self._shown :]
        self._shown = len(self._text)
        return delta

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _leave_context(self) -> None:
        """A character begins. A decoder with byte fallback judges a run of bytes as a whole, and
        the bytes before are another character's; nothing after the context is shown yet."""
        self._window = self._window[self._context :]
        self._context = 0
        self._text = self._decode(self._window)
        self._shown = 0

    def _cut(self, progressed: bool) -> None:
        """Forgets ids the window no longer needs; what is not yet shown stays the text's end."""
        if progressed and self._shown == len(self._text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._text = self._decode(self._window)
            self._shown = len(self._text)
        elif len(self._window) > _LONGEST:
            pending = len(self._text) - self._shown
            self._window = self._window[-_KEPT:]
            self._context = 0
            self._text = self._decode(self._window)
            self._shown = max(0, len(self._text) - pending)


def _trailing_replacements(text: str) -> int:
    return min(_HELD, len(text) - len(text.rstrip(_REPLACEMENT)))
