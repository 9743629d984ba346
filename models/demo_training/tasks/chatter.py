"""Small talk about Baton from `small_talk.toml`, and the answer to what is beyond the model."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from models.demo_training.tasks.turn import Turn, below, pick
from models.demo_training.tasks.words import ADJECTIVES, LETTERS, NOUNS

TASK = "small talk"
BEYOND = "beyond me"

_OPENINGS = (
    "Hi! ",
    "Hello, ",
    "Please tell me: ",
    "Can you tell me: ",
    "I would like to know: ",
    "I wonder: ",
    "One question: ",
    "So, ",
    "And ",
    "OK, ",
)
_CLOSINGS = (", please", " in short", " in a few words", " again", " then")
# Other ways to begin a question; by its usual beginning.
_REWORDED = (
    (
        "What is ",
        ("What's ", "whats ", "Explain ", "Tell me about ", "Describe ", "Define ", "Can you explain "),
    ),
    ("What are ", ("Explain ", "Tell me about ", "Describe ", "Can you explain ", "what're ")),
    ("How do I ", ("How can I ", "How to ", "I want to ", "How would I ", "Show me how to ")),
    ("What happens when ", ("What if ", "What happens if ", "What will happen when ", "And when ")),
    ("What if ", ("What happens if ", "What happens when ", "And if ")),
    ("Can I ", ("Could I ", "May I ", "Am I able to ")),
    ("Does Baton ", ("Will Baton ", "Can Baton ", "Does it ")),
    ("Tell me ", ("Please tell me ", "Can you tell me ", "I want to hear ")),
)
_ARTICLES = ("a", "the", "my", "this")
_FRAGMENT_WORDS = 6


@dataclass(frozen=True, slots=True)
class Book:
    """The file, read once: (ways to ask, answer) for each topic, and what is answered to all else."""

    topics: tuple[tuple[tuple[str, ...], str], ...]
    beyond: str
    beyond_asks: tuple[str, ...]
    things: tuple[str, ...]
    kinds: tuple[str, ...]


@cache
def book() -> Book:
    document = tomllib.loads(Path(__file__).with_name("small_talk.toml").read_text(encoding="utf-8"))
    fallback = document["fallback"]
    return Book(
        topics=tuple((tuple(topic["ask"]), topic["answer"]) for topic in document["topic"]),
        beyond=fallback["answer"],
        beyond_asks=tuple(fallback["ask"]),
        things=tuple(fallback["thing"]),
        kinds=tuple(fallback["kind"]),
    )


def small_talk(draw: random.Random) -> Turn:
    """A topic, asked in one of its ways."""
    asks, answer = book().topics[below(draw, len(book().topics))]
    return Turn(TASK, _spoken(draw, pick(draw, asks)), answer)


def beyond_me(draw: random.Random) -> Turn:
    """A question on the world, loose words, or typed noise."""
    chance = draw.random()
    if chance < 0.6:
        wording = pick(draw, book().beyond_asks)
        filled = wording.format(
            thing=_thing(draw), other=_thing(draw), kind=pick(draw, (*book().kinds, *ADJECTIVES))
        )
        question = _spoken(draw, filled)
    elif chance < 0.8:
        words = _every_word()
        question = " ".join(pick(draw, words) for _ in range(1 + below(draw, _FRAGMENT_WORDS)))
    else:
        question = " ".join(
            "".join(draw.choices(LETTERS, k=2 + below(draw, 8)))
            for _ in range(1 + below(draw, _FRAGMENT_WORDS))
        )
    return Turn(BEYOND, question, book().beyond)


def _thing(draw: random.Random) -> str:
    if draw.random() < 0.5:
        return pick(draw, book().things)
    return f"{pick(draw, _ARTICLES)} {pick(draw, NOUNS)}"


def prose(draw: random.Random) -> str:
    """Some answers in a row, as plain text to continue."""
    return " ".join(answer for _, answer in draw.sample(book().topics, 3))


def _spoken(draw: random.Random, text: str) -> str:
    """Rewrites a text as people type: in other words, without an end mark, in lower case, with words around
    it or a slip."""
    for beginning, others in _REWORDED:
        if text.startswith(beginning) and draw.random() < 0.4:
            text = pick(draw, others) + text.removeprefix(beginning)
            break
    mark = "?" if text.split(" ", 1)[0] in _ASKING else "."
    if draw.random() < 0.1:
        text += pick(draw, _CLOSINGS)
    if draw.random() < 0.6:
        text += mark
    if draw.random() < 0.2:
        text = pick(draw, _OPENINGS) + text[0].lower() + text[1:]
    text = text.lower() if draw.random() < 0.25 else text
    return _mistyped(draw, text) if draw.random() < 0.06 else text


def _mistyped(draw: random.Random, text: str) -> str:
    """One letter lost, doubled, or exchanged with the next."""
    place = below(draw, len(text) - 1)
    first, second = text[place], text[place + 1]
    slip = pick(draw, (second, first + first + second, second + first))
    return text[:place] + slip + text[place + 2 :]


@cache
def _every_word() -> tuple[str, ...]:
    texts: Sequence[str] = [answer for _, answer in book().topics]
    return tuple(
        sorted({word.strip(".,:") for text in texts for word in text.split()} | {*NOUNS, *ADJECTIVES})
    )


_QUESTION_WORDS = "What Who How Which Why Where When Can Do Does Are Is Should"
_ASKING = frozenset(_QUESTION_WORDS.split())
