"""Batches of rows, made by worker processes ahead of the trainer. The batch of a step depends on the seed
and the step alone, so any number of workers, and a run that was resumed, see the same data."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.demo_training.conversation import Row, RowMaker

_AHEAD_A_WORKER = 4
_LONGEST_BATCH_S = 120.0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Rows of a step and their tokens; long lists grow to full length over `growth_share` of all steps."""

    seed: int
    steps: int
    short_rows: int
    short_tokens: int
    long_rows: int
    long_tokens: int
    growth_share: float = 0.3

    @property
    def tokens(self) -> int:
        """Predicted tokens of one step."""
        return self.short_rows * self.short_tokens + self.long_rows * self.long_tokens


class Rows(NamedTuple):
    """Equal rows: ids uint16 and whose they are bool, `(rows, tokens + 1)`: the last is only predicted."""

    ids: npt.NDArray[np.uint16]
    answers: npt.NDArray[np.bool_]


class Batch(NamedTuple):
    """The rows that one step learns from."""

    short: Rows
    long: Rows


def make_batch(plan: BatchPlan, maker: RowMaker, step: int) -> Batch:
    """The batch of a step, from nothing but the plan."""
    draw = random.Random(f"{plan.seed}/{step}")
    stretch = min(1.0, step / max(1.0, plan.growth_share * plan.steps))
    return Batch(
        _stack([maker.short(draw, plan.short_tokens + 1) for _ in range(plan.short_rows)]),
        _stack([maker.long(draw, plan.long_tokens + 1, stretch) for _ in range(plan.long_rows)]),
    )


class BatchSource:
    """Worker processes that make batches, running at most a few steps ahead of who takes them.

    They are forked on entering: enter before anything touches a GPU."""

    def __init__(self, plan: BatchPlan, tokenizer: Path, workers: int) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._workers = workers

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("fork")
        self._pool = context.Pool(self._workers, _start, (self._plan, self._tokenizer))
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def batches(self, first: int) -> Iterator[Batch]:
        """Yields the batches of the steps from `first` to the plan's last, in order."""
        ahead = min(self._plan.steps, first + self._workers * _AHEAD_A_WORKER)
        pending = deque(self._pool.apply_async(_make, (step,)) for step in range(first, ahead))
        while pending:
            batch = pending.popleft().get(_LONGEST_BATCH_S)
            if ahead < self._plan.steps:
                pending.append(self._pool.apply_async(_make, (ahead,)))
                ahead += 1
            yield batch


def _stack(rows: list[Row]) -> Rows:
    return Rows(np.stack([row.ids for row in rows]), np.stack([row.answers for row in rows]))


class _Worker:
    """State that a worker process keeps between its batches."""

    plan: BatchPlan
    maker: RowMaker


def _start(plan: BatchPlan, tokenizer: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.plan, _Worker.maker = plan, RowMaker(Tokenizer.from_file(str(tokenizer)))


def _make(step: int) -> Batch:
    return make_batch(_Worker.plan, _Worker.maker, step)
