"""The text and bytes of single tokens, as logprobs report them.

A token may be part of a character in byte-level vocabularies. OpenAI's API writes such a token as
`bytes:\\xe2\\x82`; chat completions also return every token's bytes.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Sentencepiece's mark of a space before a word, which decoders drop at the beginning of a text.
_WORD_MARK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Maps the printable characters by which byte-level tokenizers represent bytes to those bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }


_ALPHABET = _byte_alphabet()


class TokenTexts:
    """Texts of single tokens, cached: at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """The token as text, or as `bytes:\\xe2` if it is not valid UTF-8."""
        return self._look_up(token_id)[0]

    def data(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id without a token."""
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is None:
            data = self._bytes(token_id)
            known = self._known[token_id] = (_as_text(data), data)
        return known

    def _bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text:
            return _raw_bytes(token)
        if token.startswith(_WORD_MARK) and not text.startswith(" "):
            text = f" {text}"
        return text.encode()


def _raw_bytes(token: str) -> bytes:
    """The bytes of a token that is not valid UTF-8, from its spelling in the vocabulary."""
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def _as_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
