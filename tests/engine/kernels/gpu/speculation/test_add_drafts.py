"""Drafts that get a row, and their places, against a plain list of the same rule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from baton.engine.kernels.gpu.speculation.add_drafts import add_drafts
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.shared_memory.mailbox import Feature
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays

VOCAB = 97
RING_WORDS = 1 << 10
# Rows as tuples (slot, token, position, depth, place).
Row = tuple[int, int, int, int, int]


def useful(slot: Slot, most: int) -> int:
    """Drafts of a slot that may have a row."""
    if slot.features & Feature.MASKED or slot.drafts_of not in (None, (slot.generation, slot.position)):
        return 0
    count = min(len(slot.drafts), slot.most_drafts, slot.budget, most)
    return max(min(count, slot.capacity - 1 - slot.position, slot.end - 2 - slot.position), 0)


def listed(slots: list[Slot], order: list[int], most: int, room: int, steps: int) -> list[Row]:
    """The rows of the step."""
    granted = dict.fromkeys(order, 0)
    turn = steps % max(len(order), 1)
    for depth in range(1, most + 1):
        for number in order[turn:] + order[:turn]:
            wants = useful(slots[number], most) >= depth == granted[number] + 1
            if wants and len(order) + sum(granted.values()) < room:
                granted[number] = depth
    rows: list[Row] = []
    for number in order:
        slot = slots[number]
        tokens = [slot.last_token, *slot.drafts]
        for depth in range(1 + granted[number]):
            token = tokens[depth] if 0 <= tokens[depth] < VOCAB else 0
            rows.append((number, token, slot.position + depth, depth, len(rows)))
    return rows


def added(
    slots: list[Slot],
    order: list[int],
    bucket: int,
    *,
    most: int = 7,
    steps: int = 0,
    ring_room: int = RING_WORDS,
    bounds: list[tuple[int, int]] | None = None,
    fixed: int | None = None,
) -> tuple[list[Row], list[int]]:
    """The kernel's rows, and what it says was given to each of `order`. Rows beyond are checked here."""
    arrays = SlotArrays(slots, bucket)
    places = list(range(len(order))) + [-1] * (bucket - len(order))
    mine = [slots[number] for number in order]
    arrays.set_rows(
        slot=order + [0] * (bucket - len(order)),
        token=[slot.last_token for slot in mine],
        position=[slot.position for slot in mine] + [0] * (bucket - len(order)),
        place=places,
    )
    control = arrays.control
    control[kernels.ROWS.value], control[kernels.STEPS.value] = len(order), steps
    control[kernels.TAIL.value], control[kernels.HEAD.value] = 5000, 5000 + RING_WORDS - ring_room
    item_bounds = torch.tensor(bounds or [(1 << 30, 0)], dtype=torch.int32, device=DEVICE)
    add_drafts(
        arrays.rows, arrays.given, arrays.drafts, arrays.records, control, item_bounds, bucket,
        most=most, vocab=VOCAB, ring_words=RING_WORDS, fixed=fixed,
    )  # fmt: skip
    count = int(control[kernels.ROWS.value])
    rows = arrays.rows
    columns = [column.tolist() for column in (rows.slot, rows.token, rows.position, rows.depth, rows.place)]
    assert columns[0][count:] == columns[2][count:] == columns[3][count:] == [0] * (bucket - count)
    assert columns[4][count:] == [-1] * (bucket - count)
    return [*zip(*(column[:count] for column in columns), strict=True)], [
        int(arrays.given[number]) for number in order
    ]


A = Slot(10, last_token=3, drafts=(21, 22, 23))
B = Slot(20, last_token=4, drafts=(31,))
C = Slot(30, last_token=5)


def test_rows_of_a_slot_lie_side_by_side() -> None:
    rows, given = added([A, B, C], [2, 0, 1], 16)
    assert rows == [
        (2, 5, 30, 0, 0), (0, 3, 10, 0, 1), (0, 21, 11, 1, 2), (0, 22, 12, 2, 3), (0, 23, 13, 3, 4),
        (1, 4, 20, 0, 5), (1, 31, 21, 1, 6),
    ]  # fmt: skip
    assert given == [0, 3, 1]


def test_a_first_draft_comes_before_a_second_one_and_turns_begin_with_another_slot() -> None:
    slots = [replace(A, position=10 * n) for n in range(1, 4)]
    for steps, expected in enumerate(([2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1])):
        assert added(slots, [0, 1, 2], 7, steps=steps)[1] == expected
    assert added(slots, [0, 1, 2], 5, steps=1)[1] == [0, 1, 1]
    assert added(slots, [0, 1, 2], 3)[1] == [0, 0, 0]


@pytest.mark.parametrize(
    ("slot", "given"),
    [
        (A, 3),
        (replace(A, drafts_of=(1, 9)), 0),
        (replace(A, drafts_of=(1, 11)), 0),
        (replace(A, drafts_of=(2, 10)), 0),
        (replace(A, generation=65535), 3),
        (replace(A, most_drafts=0), 0),
        (replace(A, most_drafts=2), 2),
        (replace(A, budget=0), 0),
        (replace(A, budget=2), 2),
        (replace(A, features=int(Feature.GREEDY | Feature.MASKED)), 0),
        (replace(A, capacity=11), 0),
        (replace(A, capacity=12), 1),
        (replace(A, end=12), 0),
        (replace(A, end=13), 1),
        (replace(A, end=14, capacity=13), 2),
    ],
)
def test_drafts_are_for_one_token_and_within_the_request_its_blocks_and_its_end(
    slot: Slot, given: int
) -> None:
    rows, counts = added([slot], [0], 8)
    assert counts == [given]
    assert rows == listed([slot], [0], 7, 8, 0)


def test_no_more_than_are_configured() -> None:
    assert added([A, B], [0, 1], 16, most=2)[1] == [2, 1]


def test_an_id_beyond_the_vocabulary_is_not_looked_up() -> None:
    rows, _ = added([replace(A, drafts=(VOCAB, -1, VOCAB - 1))], [0], 8)
    assert [token for _, token, _, _, _ in rows] == [3, 0, 0, VOCAB - 1]


def test_a_ring_with_room_for_first_rows_alone_takes_no_drafts() -> None:
    assert added([A, B, C], [0, 1, 2], 16, ring_room=3)[1] == [0, 0, 0]
    assert added([A, B, C], [0, 1, 2], 16, ring_room=4)[1] == [1, 0, 0]
    assert added([A, B, C], [0, 1, 2], 16, ring_room=6)[1] == [2, 1, 0]


def test_attention_items_that_are_few_go_to_first_rows() -> None:
    """The first slot's rows need 4 items each in parts of 64 tokens, the second slot's one."""
    long, short = replace(A, position=200), replace(B, position=20, drafts=(31, 32))
    for bound, expected in (
        (-1, [2, 2]),
        (-2, [2, 1]),
        (-6, [1, 1]),
        (-7, [1, 0]),
        (-8, [0, 0]),
        (-11, [0, 0]),
    ):
        bounds = [(1 << 30, bound)]
        assert added([long, short], [0, 1], 16, most=2, bounds=bounds, fixed=64)[1] == expected
    assert added([long, short], [0, 1], 16, most=2, bounds=[(64, 0), (1 << 30, -14)], fixed=64)[1] == [0, 0]
    assert added([long, short], [0, 1], 16, most=2, bounds=[(64, 0)], fixed=64)[1] == [2, 2]
    # The first row has one item, that of the second draft two.
    grows = replace(B, position=62, drafts=(31, 32))
    assert added([grows], [0], 16, most=2, bounds=[(1 << 30, -13)], fixed=64)[1] == [1]


def test_a_step_without_rows_gets_none() -> None:
    assert added([A], [], 8) == ([], [])


@pytest.mark.parametrize("seed", range(12))
def test_random_slots(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 20)
    slots = []
    for _ in range(count):
        position = draw.randint(0, 40)
        slots.append(
            Slot(
                position,
                last_token=draw.randrange(VOCAB),
                generation=draw.choice((0, 1, 65535)),
                capacity=position + draw.choice((1, 2, 5, 100)),
                end=position + draw.choice((2, 3, 6, 100)),
                most_drafts=draw.choice((0, 3, 7, 7)),
                features=draw.choice((1, 1, 2, int(Feature.MASKED | Feature.GREEDY))),
                drafts=tuple(draw.choices(range(VOCAB), k=draw.randint(0, 7))),
                budget=draw.choice((7, 7, 7, 0, 2)),
                drafts_of=draw.choice((None, None, None, (1, position + 1))),
            )
        )
    order = draw.sample(range(count), draw.randint(1, count))
    bucket, most = draw.randint(len(order), 8 * count), draw.randint(1, 7)
    room, steps = draw.choice((RING_WORDS, len(order) + draw.randint(0, 9))), draw.randint(0, 1000)
    rows, given = added(slots, order, bucket, most=most, steps=steps, ring_room=room)
    expected = listed(slots, order, most, min(bucket, room), steps)
    assert rows == expected
    assert given == [sum(row[0] == number for row in expected) - 1 for number in order]
