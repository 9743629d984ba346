"""Look up the value of a key in a long list: the KV cache's own exam.

The answer names the key before the value. So its first token, which prefill samples itself, gives nothing
away, and each digit has to be read from the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from models.demo_training.turn import Turn, below, pick
from models.demo_training.words import ADJECTIVES, LETTERS, NOUNS

TASK = "retrieve"

_HEADINGS = (
    "Here is a list of values.",
    "These are the values:",
    "Remember this list.",
    "Read this list.",
    "This is what I noted down:",
    "List:",
)
_QUESTIONS = (
    "What is the value of {}?",
    "Tell me the value of {}.",
    "Look up {}.",
    "Which value has {}?",
    "Find {} in the list.",
    "And {}?",
)
_SEPARATORS = (":", ":", ":", " =", " is")
_CODES = LETTERS + "0123456789"


@dataclass(frozen=True, slots=True)
class Listing:
    """A list in a user's message. `entries` are (key, value), keys distinct; a line is about 9 tokens."""

    heading: str
    separator: str
    entries: list[tuple[str, str]]

    @property
    def text(self) -> str:
        between = self.separator + " "
        return "\n".join([self.heading, *(f"- {key}{between}{value}" for key, value in self.entries)])

    def asked(self, draw: random.Random) -> Iterator[Turn]:
        """The list with a question about one entry, then questions about all others: no entry comes twice,
        so that no answer can be copied from an earlier one."""
        order = draw.sample(self.entries, len(self.entries))
        opening = _question(draw, order)
        yield Turn(TASK, f"{self.text}\n{opening.question}", opening.answer)
        while order:
            yield _question(draw, order)


def _question(draw: random.Random, order: list[tuple[str, str]]) -> Turn:
    """About the last of `order`, or now and then the last two, which are taken off."""
    key, value = order.pop()
    asked = pick(draw, _QUESTIONS)
    if asked is _QUESTIONS[0] and order and draw.random() < 0.3:
        other, also = order.pop()
        answer = f"{sentence(key, value)} {sentence(other, also)}"
        return Turn(TASK, f"What are the values of {key} and {other}?", answer)
    return Turn(TASK, asked.format(key), sentence(key, value))


def sentence(key: str, value: str) -> str:
    """How an answer words it."""
    return f"The value of {key} is {value}."


def plain_listing(draw: random.Random, entries: int) -> Listing:
    """Keys of an adjective and a noun, values of four digits: what the scores are measured on."""
    pairs = draw.sample(range(len(ADJECTIVES) * len(NOUNS)), entries)
    values = draw.choices(range(10_000), k=entries)
    width = len(NOUNS)
    named = [
        (f"{ADJECTIVES[pair // width]} {NOUNS[pair % width]}", f"{value:04d}")
        for pair, value in zip(pairs, values, strict=True)
    ]
    return Listing(pick(draw, _HEADINGS), _SEPARATORS[0], named)


def varied_listing(draw: random.Random, entries: int) -> Listing:
    """Keys and values of other kinds too: single words, codes, numbers of other lengths."""
    keys = set(_take(_keys(draw), entries))
    values = _values(draw)
    named = [(key, next(values)) for key in sorted(keys)]
    draw.shuffle(named)
    return Listing(pick(draw, _HEADINGS), pick(draw, _SEPARATORS), named)


def _take(source: Iterator[str], count: int) -> Iterator[str]:
    return (next(source) for _ in range(count))


def _keys(draw: random.Random) -> Iterator[str]:
    kind = below(draw, 4)
    while True:
        if kind == 0:
            yield f"{pick(draw, ADJECTIVES)} {pick(draw, NOUNS)}"
        elif kind == 1:
            yield pick(draw, NOUNS)
        elif kind == 2:
            yield "".join(draw.choices(_CODES, k=2 + below(draw, 4)))
        else:
            yield f"{pick(draw, NOUNS)} {below(draw, 100)}"


def _values(draw: random.Random) -> Iterator[str]:
    kind = below(draw, 4)
    digits = 1 + below(draw, 6)
    while True:
        if kind == 0:
            yield str(below(draw, 10**digits))
        elif kind == 1:
            yield pick(draw, ADJECTIVES)
        elif kind == 2:
            yield "".join(draw.choices(_CODES, k=digits + 1))
        else:
            yield f"{pick(draw, ADJECTIVES)} {pick(draw, NOUNS)}"
