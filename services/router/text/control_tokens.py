"""Keeps client text from becoming control tokens of the chat format.

A chat template writes control tokens, such as those that begin a turn, into one text with the messages, where
the tokenizer recognises them. In the client's strings each spelling of a control token is therefore split by
a separator that occurs nowhere else. The rendered text is cut at the separators and its parts are tokenised
one by one, so that no part has a control token which the template did not write. Text without such a spelling
is unchanged, and tokenised in one piece.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

# Some vocabularies mark only some of their control tokens as special: DeepSeek's <|User|> is not marked.
_CONTROL_SPELLING = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_PREFIX_CHARS = 2
_SEPARATORS = range(0xF0000, 0x10FFFE)


class ControlTokens:
    """The spellings of a model's control tokens."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """Ignores spellings of a single character, which cannot be cut."""
        self._by_prefix: dict[str, list[str]] = defaultdict(list)
        for spelling in spellings:
            if len(spelling) >= _PREFIX_CHARS:
                self._by_prefix[spelling[:_PREFIX_CHARS]].append(spelling)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ControlTokens:
        """The control tokens of a tokenizer: special tokens, and added tokens that are spelt like one."""
        added = tokenizer.get_added_tokens_decoder().values()
        return cls(
            token.content for token in added if token.special or _CONTROL_SPELLING.fullmatch(token.content)
        )

    def found_in(self, text: str) -> list[str]:
        """The spellings that occur in a text."""
        return [
            spelling
            for prefix, spellings in self._by_prefix.items()
            if prefix in text
            for spelling in spellings
            if spelling in text
        ]


def cut(value: object, spellings: list[str], separator: str) -> object:
    """Cuts every occurrence of the spellings in the strings of a JSON value, including keys."""
    if isinstance(value, str):
        for spelling in spellings:
            while spelling in value:  # a second pass where occurrences overlap
                value = value.replace(spelling, spelling[0] + separator + spelling[1:])
        return value
    if isinstance(value, dict):
        return {cut(key, spellings, separator): cut(one, spellings, separator) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [cut(one, spellings, separator) for one in value]
    return value


def strings_of(value: object) -> Iterator[str]:
    """Every string of a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from strings_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_of(one)


def unused_separator(text: str) -> str:
    """A private-use character that does not occur in a text."""
    used = set(text)
    return next(character for character in map(chr, _SEPARATORS) if character not in used)
