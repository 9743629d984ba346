"""Look up the value of a key in a long list: the KV cache's own exam.

The answer names the key before the value. So its first token, which prefill samples itself, gives nothing
away, and each digit has to be read from the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from models.demo_training.tasks.turn import Turn, below, pick
from models.demo_training.tasks.words import ADJECTIVES, LETTERS, NAMES, NOUNS

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
    "What is {}?",
    "What's {}?",
    "And {}?",
    "{}?",
)
_CODES = LETTERS + "0123456789"
_MISSING_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Listing:
    """A list in a user's message: its text, its (key, value) entries of distinct keys, and keys it lacks."""

    text: str
    entries: list[tuple[str, str]]
    missing: list[str]

    def asked(self, draw: random.Random) -> Iterator[Turn]:
        """The list with a question about one entry, then questions about all others: no entry comes twice,
        so that no answer can be copied from an earlier one. Here and there one about a key that it lacks."""
        order, missing = draw.sample(self.entries, len(self.entries)), list(self.missing)
        opening = _question(draw, order, missing)
        yield Turn(TASK, f"{self.text}\n{opening.question}", opening.answer)
        while order:
            yield _question(draw, order, missing)


def _question(draw: random.Random, order: list[tuple[str, str]], missing: list[str]) -> Turn:
    """About the last of `order`, now and then the last two, or one of `missing`; which are taken off."""
    asked = pick(draw, _QUESTIONS)
    if missing and draw.random() < _MISSING_SHARE:
        key = missing.pop()
        return Turn(TASK, asked.format(key), f"There is no {key} in the list.")
    key, value = order.pop()
    if asked is _QUESTIONS[0] and order and draw.random() < 0.3:
        other, also = order.pop()
        answer = f"{sentence(key, value)} {sentence(other, also)}"
        return Turn(TASK, f"What are the values of {key} and {other}?", answer)
    return Turn(TASK, asked.format(key), sentence(key, value))


def sentence(key: str, value: str) -> str:
    """Returns the sentence of an answer."""
    return f"The value of {key} is {value}."


def plain_listing(draw: random.Random, entries: int, *, with_missing: bool = True) -> Listing:
    """Keys of an adjective and a noun, values of four digits: what the scores are measured on.

    A line is 10 tokens long.
    """
    lacking = 1 + entries // 10 if with_missing else 0
    pairs = draw.sample(range(len(ADJECTIVES) * len(NOUNS)), entries + lacking)
    keys = [f"{ADJECTIVES[pair // len(NOUNS)]} {NOUNS[pair % len(NOUNS)]}" for pair in pairs]
    values = draw.choices(range(10_000), k=entries)
    named = [(key, f"{value:04d}") for key, value in zip(keys, values, strict=False)]
    text = "\n".join([pick(draw, _HEADINGS), *(f"- {key}: {value}" for key, value in named)])
    return Listing(text, named, keys[entries:])


def varied_listing(draw: random.Random, entries: int) -> Listing:
    """Keys, values and layouts of other kinds too: single words, names, codes, numbers of other lengths."""
    keys = sorted(set(islice(_keys(draw), entries + 1)))
    draw.shuffle(keys)
    missing = [keys.pop()] if len(keys) > 1 else []
    named = list(zip(keys, _values(draw), strict=False))
    heading = [pick(draw, _HEADINGS)] if draw.random() < 0.7 else []
    between = pick(draw, (": ", ": ", " = ", " is ", "=", " -> "))
    lines = [f"{key}{between}{value}" for key, value in named]
    if draw.random() < 0.25:
        return Listing(" ".join([*heading, f"{', '.join(lines)}."]), named, missing)
    bullet = pick(draw, ("- ", "- ", "* ", ""))
    return Listing("\n".join([*heading, *(bullet + line for line in lines)]), named, missing)


def _keys(draw: random.Random) -> Iterator[str]:
    kind = below(draw, 6)
    while True:
        if kind == 0:
            yield f"{pick(draw, ADJECTIVES)} {pick(draw, NOUNS)}"
        elif kind == 1:
            yield pick(draw, NOUNS)
        elif kind == 2:
            yield "".join(draw.choices(_CODES, k=2 + below(draw, 4)))
        elif kind == 3:
            yield pick(draw, NAMES)
        elif kind == 4:
            yield pick(draw, NAMES).lower()
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
