"""The accept rule beside its definition, one row after the other."""

from __future__ import annotations

import random

import torch

from baton.engine.speculation.acceptance import accepted


def one_by_one(depth: list[int], tokens: list[int], drawn: list[int], ends: list[bool]) -> list[bool]:
    counts: list[bool] = []
    for row, deep in enumerate(depth):
        if deep == 0:
            counts.append(True)
        else:
            counts.append(counts[row - 1] and tokens[row] == drawn[row - 1] and not ends[row - 1])
    return counts


def test_rows_count_as_far_as_plain_steps_would_have_come() -> None:
    draw, deepest = random.Random(1), set[int]()
    for _ in range(300):
        lengths = [draw.randint(1, 8) for _ in range(draw.randint(1, 6))]
        depth = [d for length in lengths for d in range(length)]
        drawn = [draw.randrange(3) for _ in depth]
        # Most drafts are right, so that slots have few and many of them that count.
        tokens = [drawn[row - 1] if draw.random() < 0.8 else draw.randrange(3) for row in range(len(depth))]
        ends = [draw.random() < 0.1 for _ in depth]
        wanted = one_by_one(depth, tokens, drawn, ends)
        made = accepted(*(torch.tensor(values) for values in (depth, tokens, drawn, ends)))
        assert made.tolist() == wanted
        deepest |= {d for d, counts in zip(depth, wanted, strict=True) if counts}
    assert deepest == set(range(8))


def test_neither_the_slot_before_nor_the_last_slot_decides_about_a_first_row() -> None:
    """The last row of each neighbour ends its sequence, or has drawn another token."""
    ends = torch.tensor([False, True, False])
    made = accepted(torch.tensor([0, 1, 0]), torch.tensor([5, 6, 5]), torch.tensor([6, 7, 9]), ends)
    assert made.tolist() == [True, True, True]
    ends = torch.tensor([True, False, True])
    made = accepted(torch.tensor([0, 0, 1]), torch.tensor([5, 5, 6]), torch.tensor([6, 6, 7]), ends)
    assert made.tolist() == [True, True, True]
