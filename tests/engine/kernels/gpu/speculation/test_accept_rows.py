"""Rows that count, against the tokens that one row a step would give."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from baton.engine.kernels.gpu.speculation.accept_rows import accept_rows
from baton.engine.kernels.gpu.step import step_kernels as kernels
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays

# Of a slot's rows: the token that each reads, and the one that it has drawn.
Drawn = list[tuple[int, int]]


def accepted(
    slots: list[Slot], steps: list[tuple[int, Drawn]], held: frozenset[int] = frozenset()
) -> list[int]:
    """Places of the rows of these (slot, drawn), those of `held` slots not drawing."""
    rows = [
        (number, depth, token, drawn) for number, step in steps for depth, (token, drawn) in enumerate(step)
    ]
    arrays = SlotArrays(slots, len(rows) + 3)
    arrays.set_rows(
        slot=[number for number, _, _, _ in rows],
        depth=[depth for _, depth, _, _ in rows],
        token=[token for _, _, token, _ in rows],
        position=[slots[number].position + depth for number, depth, _, _ in rows],
        place=[-1 if number in held else place for place, (number, _, _, _) in enumerate(rows)] + [-1] * 3,
    )
    arrays.control[kernels.ROWS.value] = len(rows)
    drawn = torch.tensor([token for _, _, _, token in rows] + [5, 5, 5], dtype=torch.int32, device=DEVICE)
    accept_rows(arrays.rows, drawn, arrays.records, arrays.control)
    places: list[int] = arrays.rows.place.tolist()
    assert places[len(rows) :] == [-1] * 3
    return places[: len(rows)]


def one_by_one(slots: list[Slot], steps: list[tuple[int, Drawn]], held: frozenset[int]) -> list[int]:
    """The rule: a slot's rows in order, until one is not what was drawn before, or what was drawn ends it."""
    places, count = [], 0
    for number, step in steps:
        slot, goes_on = slots[number], number not in held
        for depth, (token, drawn) in enumerate(step):
            goes_on = goes_on and (depth == 0 or token == step[depth - 1][1])
            places.append(count if goes_on else -1)
            count += goes_on
            goes_on = goes_on and drawn not in slot.stop_ids and slot.position + depth + 2 < slot.end
    return places


S = Slot(10)


@pytest.mark.parametrize(
    ("slot", "step", "places"),
    [
        (S, [(1, 7)], [0]),
        (S, [(1, 7), (7, 8), (8, 9)], [0, 1, 2]),
        (S, [(1, 7), (6, 8), (8, 9)], [0, -1, -1]),
        (S, [(1, 7), (7, 8), (7, 9), (9, 1)], [0, 1, -1, -1]),
        (S, [(1, 7), (6, 7), (7, 7)], [0, -1, -1]),  # right behind one that is wrong
        (replace(S, stop_ids=(3, 7)), [(1, 7), (7, 8), (8, 9)], [0, -1, -1]),
        (replace(S, stop_ids=(3, 8)), [(1, 7), (7, 8), (8, 9)], [0, 1, -1]),
        (replace(S, stop_ids=(9,)), [(1, 7), (7, 8), (8, 9)], [0, 1, 2]),
        (replace(S, stop_ids=(1,)), [(1, 7), (7, 8)], [0, 1]),  # the token that it was admitted with
        (replace(S, end=12), [(1, 7), (7, 8)], [0, -1]),
        (replace(S, end=13), [(1, 7), (7, 8), (8, 9)], [0, 1, -1]),
    ],
)
def test_the_accepted_prefix_and_nothing_behind_an_end(slot: Slot, step: Drawn, places: list[int]) -> None:
    assert accepted([slot], [(0, step)]) == places


def test_slots_do_not_meet() -> None:
    """A row is compared with the row before it only where that is of its slot, and a wrong draft, or a held
    slot, ends no other slot's rows."""
    slots = [S, replace(S, stop_ids=(7,)), S, S]
    steps = [(2, [(1, 7), (7, 8)]), (1, [(7, 7), (7, 7)]), (3, [(7, 7)]), (0, [(1, 2), (3, 4), (4, 5)])]
    assert accepted(slots, steps) == [0, 1, 2, -1, 3, 4, -1, -1]
    assert accepted(slots, steps, frozenset({3})) == [0, 1, 2, -1, -1, 3, -1, -1]
    assert accepted(slots, steps, frozenset({2})) == [-1, -1, 0, -1, 1, 2, -1, -1]


@pytest.mark.parametrize("seed", range(12))
def test_random_rows(seed: int) -> None:
    """Few tokens, so that drafts are often right, by chance too, and ends are in the midst of them."""
    draw = random.Random(seed)
    slots = [
        Slot(
            position := draw.randint(0, 9),
            end=position + draw.randint(2, 12),
            stop_ids=tuple(draw.sample(range(3, 7), draw.randint(0, 3))),
        )
        for _ in range(draw.randint(1, 30))
    ]
    numbers = draw.sample(range(len(slots)), draw.randint(1, len(slots)))
    steps = [
        (number, [(draw.randrange(4), draw.randrange(4)) for _ in range(draw.randint(1, 8))])
        for number in numbers
    ]
    for _, step in steps:  # half of them right for long
        if draw.random() < 0.5:
            step[1:] = [(before, token) for (_, before), (_, token) in pairwise(step)]
    held = frozenset(number for number in numbers if draw.random() < 0.1)
    assert accepted(slots, steps, held) == one_by_one(slots, steps, held)
