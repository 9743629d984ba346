"""The questions of the evaluation, drawn from seeds that training never uses.

Only small talk can repeat between training and exam, which is there to be known by heart, and a sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from models.demo_training.conversation import TOKENS_AN_ENTRY
from models.demo_training.tasks.arithmetic import sum_of
from models.demo_training.tasks.chatter import beyond_me, small_talk
from models.demo_training.tasks.copying import copying
from models.demo_training.tasks.json_shapes import shaped
from models.demo_training.tasks.retrieve import plain_listing
from models.demo_training.tasks.turn import Turn

# Roughly what heading, question and the chat template take of a prompt about a list.
_AROUND_A_LIST = 34


def retrieval(context_tokens: int) -> Callable[[random.Random], Turn]:
    """Questions whose whole prompt is at most `context_tokens`, and less by at most some 20."""
    entries = (context_tokens - _AROUND_A_LIST) // TOKENS_AN_ENTRY
    return lambda draw: next(plain_listing(draw, entries, with_missing=False).asked(draw))


# By name; the first four parts have scores to reach.
PARTS: dict[str, Callable[[random.Random], Turn]] = {
    "retrieve-1000": retrieval(1000),
    "retrieve-3000": retrieval(3000),
    "copy": copying,
    "arithmetic": lambda draw: sum_of(draw, three_digits=True),
    "json": shaped,
    "small talk": small_talk,
    "beyond me": beyond_me,
}
# The longest answer of each task fits: a product takes 260 tokens, a snippet less.
MAX_ANSWER_TOKENS = 400


def questions(part: str, count: int, seed: int = 0) -> list[Turn]:
    """The first `count` questions of a part."""
    draw = random.Random(f"exam/{part}/{seed}")
    return [PARTS[part](draw) for _ in range(count)]
