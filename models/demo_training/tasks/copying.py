"""Copy a list, a text or a snippet, with small edits or a continuation: what guessed tokens feed on."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.demo_training.tasks.chatter import book
from models.demo_training.tasks.turn import Turn, below, pick
from models.demo_training.tasks.words import ADJECTIVES, LETTERS, NOUNS

TASK = "copy"

Lines = list[str]


def copying(draw: random.Random) -> Turn:
    """Draws a text to copy, and a change to make in it."""
    return _KINDS[below(draw, len(_KINDS))](draw)


def _turn(request: str, source: Lines, answer: Lines) -> Turn:
    return Turn(TASK, "\n".join([request, *source]), "\n".join(answer))


def _plain(draw: random.Random) -> Turn:
    lines = _source(draw)
    request = pick(draw, _REQUESTS)
    if len(lines) == 1 and draw.random() < 0.5:
        return _turn(f"{request} {lines[0]}", [], lines)
    return _turn(request, lines, lines)


def _replace(draw: random.Random) -> Turn:
    lines = _snippet(draw) if draw.random() < 0.5 else _bullets(draw)
    words = {word for line in lines for word in _words(line)}
    old = pick(draw, tuple(sorted(words)))
    new = _other(draw, words)
    wording = pick(draw, ("Copy this, but write {new} for {old}:", "Copy this and rename {old} to {new}:"))
    changed = [_rename(line, old, new) for line in lines]
    return _turn(wording.format(old=old, new=new), lines, changed)


def _append(draw: random.Random) -> Turn:
    lines = _bullets(draw)
    word = _other(draw, {word for line in lines for word in _words(line)})
    return _turn(f"Copy this list and add {word} at the end:", lines, [*lines, f"- {word}"])


def _leave_out(draw: random.Random) -> Turn:
    lines = [f"- {noun}" for noun in draw.sample(NOUNS, _count(draw))]
    gone = below(draw, len(lines))
    return _turn(
        f"Copy this list without {lines[gone][2:]}:",
        lines,
        [line for i, line in enumerate(lines) if i != gone],
    )


def _number(draw: random.Random) -> Turn:
    lines = _bullets(draw)
    numbered = [f"{number}. {line[2:]}" for number, line in enumerate(lines, 1)]
    return _turn("Copy this list with numbers:", lines, numbered)


def _continue(draw: random.Random) -> Turn:
    start, step = below(draw, 100), 1 + below(draw, 10)
    given, more = 3 + below(draw, 4), 2 + below(draw, 5)
    numbers = [str(start + step * index) for index in range(given + more)]
    return _turn(
        f"Copy these numbers and continue with {more} more:",
        [", ".join(numbers[:given])],
        [", ".join(numbers)],
    )


def _source(draw: random.Random) -> Lines:
    return _SOURCES[below(draw, len(_SOURCES))](draw)


def _bullets(draw: random.Random) -> Lines:
    count = _count(draw)
    if draw.random() < 0.5:
        return [f"- {noun}" for noun in draw.sample(NOUNS, count)]
    return [f"- {pick(draw, ADJECTIVES)} {pick(draw, NOUNS)}" for _ in range(count)]


def _count(draw: random.Random) -> int:
    """Number of lines in a list: mostly few."""
    return 3 + below(draw, 10 if draw.random() < 0.8 else 40)


def _prose(draw: random.Random) -> Lines:
    parts = [
        f"the {pick(draw, ADJECTIVES)} {pick(draw, NOUNS)} {pick(draw, _VERBS)} the {pick(draw, NOUNS)}"
        for _ in range(1 + below(draw, 8))
    ]
    return [", and ".join(parts) + "."]


def _talk(draw: random.Random) -> Lines:
    """Two sentences of the small talk, each with another mark at its end."""
    asks, answer = book().topics[below(draw, len(book().topics))]
    sentences = draw.sample([*asks, *answer.split(". ")], 2)
    return [" ".join(f"{text.rstrip('.')}{pick(draw, ('.', '!', '?', ''))}" for text in sentences)]


def _noise(draw: random.Random) -> Lines:
    """Words of no language, some with capitals, marks or digits."""
    lines = []
    for _ in range(1 + below(draw, 3)):
        words = ("".join(draw.choices(LETTERS, k=1 + below(draw, 8))) for _ in range(1 + below(draw, 8)))
        lines.append(" ".join(_dressed(draw, word) for word in words))
    return lines


def _dressed(draw: random.Random, word: str) -> str:
    chance = draw.random()
    if chance < 0.6:
        return word
    if chance < 0.75:
        return word.capitalize()
    return (
        word + pick(draw, (",", ".", "!", "?", ":", ";", "-", "7", "42")) if chance < 0.95 else word.upper()
    )


def _digits(draw: random.Random) -> Lines:
    return [
        " ".join(str(below(draw, 10 ** (1 + below(draw, 5)))) for _ in range(3 + below(draw, 6)))
        for _ in range(1 + below(draw, 8))
    ]


def _snippet(draw: random.Random) -> Lines:
    """A small function over names of its own."""
    function, *names = draw.sample(NOUNS, 5)
    first, second = names[:2]
    lines = [f"def {function}({first}, {second}):"]
    for _ in range(1 + below(draw, 5 if draw.random() < 0.8 else 16)):
        target, left = pick(draw, tuple(names)), pick(draw, tuple(names))
        lines.append(f"    {target} = {left} {pick(draw, _OPERATORS)} {below(draw, 100)}")
    if draw.random() < 0.4:
        lines += [f"    if {first} > {second}:", f"        return {pick(draw, tuple(names))}"]
    return [*lines, f"    return {pick(draw, tuple(names))}"]


def _words(line: str) -> list[str]:
    return [
        word for word in line.replace("(", " ").replace(",", " ").replace(")", " ").split() if word in _NOUNS
    ]


def _rename(line: str, old: str, new: str) -> str:
    """Whole words only: no listed noun begins inside another word of these texts."""
    return line.replace(f" {old}", f" {new}").replace(f"({old}", f"({new}")


def _other(draw: random.Random, words: set[str]) -> str:
    while (word := pick(draw, NOUNS)) in words:
        pass
    return word


_REQUESTS = (
    "Copy this:",
    "Repeat this exactly:",
    "Write this again:",
    "Repeat after me:",
    "Say this:",
    "Copy:",
    "Repeat:",
)
_VERBS = ("finds", "follows", "passes", "likes", "carries", "watches", "leaves", "moves")
_OPERATORS = ("+", "-", "*", "/")
_NOUNS = frozenset(NOUNS)
_SOURCES: tuple[Callable[[random.Random], Lines], ...] = (_bullets, _snippet, _prose, _digits, _talk, _noise)
_KINDS = (_plain, _plain, _replace, _replace, _append, _leave_out, _number, _continue)
