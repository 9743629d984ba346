"""Rows of training: conversations of many turns, each filling its row of tokens to the end.

    short row   all tasks in turn; a list is followed by a few questions about it
    long row    a long list, then questions about it, here and there another task; then the next list

A question is always about the latest list. A few short rows begin with plain text instead, so that the
model can also continue a text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.demo_training.tasks.arithmetic import sum_of, too_hard
from models.demo_training.tasks.chatter import beyond_me, prose, small_talk
from models.demo_training.tasks.copying import copying
from models.demo_training.tasks.json_shapes import shaped
from models.demo_training.tasks.retrieve import Listing, plain_listing, varied_listing
from models.demo_training.tasks.turn import Turn, below, pick
from models.demo_training.vocabulary import ASSISTANT, BOS, END, SPECIAL_TOKENS, SYSTEM, USER

# About what one entry of a plain list takes.
TOKENS_AN_ENTRY = 10
_SHORTEST_LONG_LIST, _LONGEST_LONG_LIST = 300, 3600
_PLAIN_SHARE, _SYSTEM_SHARE, _PROSE_SHARE, _ASIDE_SHARE = 0.7, 0.1, 0.03, 0.06
_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are the demo model of Baton.",
    "Answer briefly.",
    "Be kind and exact.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of a conversation: `ids` and, for each of them, whether it is the assistant's, both
    `(length,)`, uint16 and bool."""

    ids: npt.NDArray[np.uint16]
    answers: npt.NDArray[np.bool_]


class RowMaker:
    """Turns conversations into rows; owns nothing but a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {text: _id(tokenizer, text) for text in SPECIAL_TOKENS}

    def short(self, draw: random.Random, length: int) -> Row:
        """A row of many tasks."""
        parts = self._text_first(draw) if draw.random() < _PROSE_SHARE else self._opening(draw)
        return self._fill(parts, _many_tasks(draw), length)

    def long(self, draw: random.Random, length: int, stretch: float) -> Row:
        """A row about long lists, of up to about 0.9 of `length` tokens; `stretch` in [0, 1] limits that."""
        longest = _SHORTEST_LONG_LIST + stretch * (_LONGEST_LONG_LIST - _SHORTEST_LONG_LIST)
        longest = min(longest, 0.9 * length)
        tokens = min(_SHORTEST_LONG_LIST, longest) + draw.random() * max(0, longest - _SHORTEST_LONG_LIST)
        return self._fill(self._opening(draw), _long_lists(draw, int(tokens / TOKENS_AN_ENTRY)), length)

    def prompt(self, question: str) -> list[int]:
        """The ids of a first question, as the chat template words it, up to where the answer begins."""
        special = self._special
        return [
            special[BOS], special[USER], *self.encode(question), special[END], special[ASSISTANT]
        ]  # fmt: skip

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def special_ids(self) -> dict[str, int]:
        """Id of every special token, by its text."""
        return dict(self._special)

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self._special[END]

    def _opening(self, draw: random.Random) -> _Parts:
        parts = _Parts()
        parts.add([self._special[BOS]])
        if draw.random() < _SYSTEM_SHARE:
            text = self.encode(pick(draw, _SYSTEM_TEXTS))
            parts.add([self._special[SYSTEM], *text, self._special[END]])
        return parts

    def _text_first(self, draw: random.Random) -> _Parts:
        parts = _Parts()
        parts.add([*self.encode(prose(draw)), self._special[END]], answer=True)
        parts.add([self._special[BOS]])
        return parts

    def _fill(self, parts: _Parts, turns: Iterator[Turn], length: int) -> Row:
        special = self._special
        while len(parts.ids) < length:
            turn = next(turns)
            parts.add([special[USER], *self.encode(turn.question), special[END], special[ASSISTANT]])
            parts.add([*self.encode(turn.answer), special[END]], answer=True)
        return Row(np.array(parts.ids[:length], np.uint16), np.array(parts.answers[:length], np.bool_))


def _id(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None, f"the tokenizer has no {text}"
    return int(found)


class _Parts:
    """Ids as they come, and whose they are."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.answers: list[bool] = []

    def add(self, ids: list[int], *, answer: bool = False) -> None:
        self.ids += ids
        self.answers += [answer] * len(ids)


def _many_tasks(draw: random.Random) -> Iterator[Turn]:
    while True:
        chance = draw.random()
        if chance < 0.2:
            yield from islice(_listing(draw, 3 + below(draw, 40)).asked(draw), 1 + below(draw, 8))
        else:
            yield _other_task(draw)


def _long_lists(draw: random.Random, entries: int) -> Iterator[Turn]:
    while True:
        for turn in _listing(draw, entries).asked(draw):
            yield turn
            if draw.random() < _ASIDE_SHARE:
                yield _other_task(draw)


def _listing(draw: random.Random, entries: int) -> Listing:
    return (plain_listing if draw.random() < _PLAIN_SHARE else varied_listing)(draw, entries)


def _other_task(draw: random.Random) -> Turn:
    chance = draw.random()
    if chance < 0.28:
        return copying(draw)
    if chance < 0.55:
        return sum_of(draw) if draw.random() < 0.9 else too_hard(draw)
    if chance < 0.75:
        return shaped(draw)
    return (small_talk if chance < 0.92 else beyond_me)(draw)
