"""One question and its answer: what training learns, and what the evaluation asks and marks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer. `answer` is what training shows; `judge`, where given, marks any text,
    else only `answer` is right."""

    task: str
    question: str
    answer: str
    judge: Callable[[str], bool] | None = None

    def right(self, text: str) -> bool:
        return text == self.answer if self.judge is None else self.judge(text)


def pick(draw: random.Random, choices: tuple[str, ...]) -> str:
    """One of `choices`; quicker than `draw.choice`."""
    return choices[int(draw.random() * len(choices))]


def below(draw: random.Random, stop: int) -> int:
    """A whole number in [0, stop); quicker than `draw.randrange`."""
    return int(draw.random() * stop)
