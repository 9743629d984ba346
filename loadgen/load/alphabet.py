"""Alphabets of prompts: token ids, or words whose cost in tokens is known.

A prompt is drawn as an array of symbols, which defines repetition and sharing, and is converted to ids or
text last. So every kind of prompt works with every kind of target, and its length is known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.common.arrays import Integers
from loadgen.common.settings import PromptSettings

Content = list[int] | str

# Common words, one token each in most vocabularies.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country"
    " problem hand part place case week company system program question work government number night point"
    " home water room mother area money story fact month lot right study book eye job word business issue"
    " side kind head house service friend father power hour game line end member law car city community"
    " name president team minute idea kid body information back parent face others level office door health"
    " person art war history party result change morning reason research girl guy moment air teacher force"
    " education"
)
LEXICON = tuple(dict.fromkeys(_COMMON.split()))


@dataclass(frozen=True, slots=True)
class IdAlphabet:
    """An alphabet of token ids below `size`."""

    size: int
    cost: int = 1

    def content(self, symbols: Integers, tokens: int) -> Content:
        """Returns the first `tokens` symbols as ids."""
        ids: list[int] = symbols[:tokens].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class WordAlphabet:
    """An alphabet of words that all cost the same number of tokens."""

    words: tuple[str, ...]
    cost: int
    overhead: int

    @property
    def size(self) -> int:
        """The number of different symbols."""
        return len(self.words)

    def content(self, symbols: Integers, tokens: int) -> Content:
        """Text of `tokens` tokens by the server's count, or less than one word fewer; at least one word."""
        return "".join(self.words[symbol] for symbol in symbols[: self._whole(tokens)].tolist())

    def counted(self, tokens: int) -> int:
        """The server's count of a text for `tokens` tokens."""
        return self.overhead + self._whole(tokens) * self.cost

    def _whole(self, tokens: int) -> int:
        return max(1, (tokens - self.overhead) // self.cost)


Alphabet = IdAlphabet | WordAlphabet


def alphabet_of(prompts: PromptSettings) -> Alphabet:
    """The alphabet of a run's prompts."""
    if prompts.words is None:
        return IdAlphabet(prompts.vocab_size)
    words = prompts.words
    return WordAlphabet(words.words, words.cost, words.overhead)
