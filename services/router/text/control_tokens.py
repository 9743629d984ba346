"""Keeps client text from becoming control tokens of the chat format.

A chat template writes control tokens, such as those that begin a turn, into one text with the messages, where
the tokenizer recognises them. The text is therefore cut within each spelling that is the client's, and its
parts are tokenised one by one, so that no part has a control token which the template did not write. A second
rendering shows which ones are the client's: in it those are marked (`Marks`), or else the template's own. The
text that is tokenised is that of the first one, in which the template sees what the client sent.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

# Some vocabularies mark only some of their control tokens as special: DeepSeek's <|User|> is not marked.
_CONTROL_SPELLING = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_PREFIX_CHARS = 2
# Letters without case, which no function of a template changes or escapes, except JSON in ASCII.
_LETTERS = (range(0x4E00, 0x9FF0), range(0x20000, 0x2A6D0))


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

    def all(self) -> list[str]:
        """Every spelling of the control tokens."""
        return [spelling for spellings in self._by_prefix.values() for spelling in spellings]

    def found_in(self, text: str) -> list[str]:
        """The spellings that occur in a text."""
        return [
            spelling
            for prefix, spellings in self._by_prefix.items()
            if prefix in text
            for spelling in spellings
            if spelling in text
        ]


class Marks:
    """Replaces the first character of each spelling of a control token by a letter that stands for it."""

    def __init__(self, spellings: Iterable[str], text: str = "") -> None:
        """`text`: has no such letter afterwards. ValueError where it has too many different characters."""
        longest_first = sorted(spellings, key=len, reverse=True)
        # A single character each, so that overlapping ones are all found.
        choice = "|".join(map(re.escape, longest_first))
        self._spelling = re.compile(f"(?=(?:{choice}))(?s:.)" if choice else "(?!)")
        firsts = sorted({spelling[0] for spelling in longest_first})
        self.letters = dict(zip(firsts, _unused_letters(text), strict=False))
        if len(self.letters) < len(firsts):
            raise ValueError("the text has too many different characters")
        # As they are, and as JSON in ASCII has them.
        self._first = {letter: first for first, letter in self.letters.items()}
        self._first |= {json.dumps(letter)[1:-1]: first for letter, first in self._first.items()}
        self._letter = re.compile("|".join(map(re.escape, self._first)) or "(?!)")

    def places(self, text: str) -> list[int]:
        """Offsets at which the spellings begin in a text."""
        return [found.start() for found in self._spelling.finditer(text)]

    def mark(self, text: str) -> str:
        """Replaces the spellings in a text by marks."""
        return self._spelling.sub(lambda found: self.letters[found[0]], text)

    def mark_all(self, value: object) -> object:
        """The JSON value with marks in its strings, keys too."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark_all(key): self.mark_all(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(one) for one in value]
        return value

    def unmark(self, text: str) -> tuple[str, list[int]]:
        """The text without marks, and where they were in it."""
        parts: list[str] = []
        places: list[int] = []
        end = length = 0
        for found in self._letter.finditer(text):
            length += found.start() - end
            places.append(length)
            parts += (text[end : found.start()], self._first[found[0]])
            end, length = found.end(), length + 1
        return "".join((*parts, text[end:])), places


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The parts of a text that is cut behind the characters at these places."""
    ends = [place + 1 for place in places]
    pairs = zip([0, *ends], [*ends, len(text)], strict=True)
    return [text[begin:end] for begin, end in pairs if begin < end]


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


def _unused_letters(text: str) -> Iterator[str]:
    """Letters that do not occur in a text, nor does what JSON in ASCII makes of them."""
    used = set(text)
    for letter in (chr(code) for codes in _LETTERS for code in codes):
        if letter not in used and json.dumps(letter)[1:-1] not in text:
            yield letter
