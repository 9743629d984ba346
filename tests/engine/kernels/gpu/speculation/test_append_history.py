"""Histories after a step's tokens, beside those that plain torch appends."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.kernels.gpu.speculation.append_history import append_history
from baton.engine.kernels.gpu.step.step_kernels import ROWS
from baton.engine.speculation.history import History
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays, ints


@pytest.mark.parametrize("length", [9, 32])
def test_tokens_that_count_are_appended_and_no_others(length: int) -> None:
    """Over the ring's end within a step, with predictions, and slots that have no row."""
    draw, slots = random.Random(length), 5
    mine, twin = (History(slots, length, torch.device(DEVICE)) for _ in range(2))
    position = [draw.randint(1, 30) for _ in range(slots)]
    for slot in range(slots):
        text, prediction = ([draw.randrange(97) for _ in range(n)] for n in (position[slot] + 1, slot))
        mine.fill(slot, text, prediction)
        twin.fill(slot, text, prediction)
    for _ in range(12):
        rows = []
        for slot in draw.sample(range(slots), draw.randint(1, slots)):
            counting = draw.randint(0, 4)
            rows += [(slot, depth, depth < counting) for depth in range(draw.randint(max(counting, 1), 5))]
        arrays = SlotArrays([Slot(one) for one in position], len(rows) + 2)
        drawn = ints(len(rows) + 2)
        drawn[: len(rows)] = torch.tensor([draw.randrange(97) for _ in rows], dtype=torch.int32)
        counts = iter(range(len(rows)))
        places = [next(counts) if count else -1 for _, _, count in rows]
        arrays.set_rows(
            slot=[slot for slot, _, _ in rows],
            position=[position[slot] + depth for slot, depth, _ in rows],
            place=[*places, 7, 8],  # beyond the step's rows
        )
        arrays.control[ROWS.value] = len(rows)
        own = arrays.rows
        append_history(mine, (own.slot, own.position, own.place), drawn, arrays.control)
        kept = torch.tensor([count for _, _, count in rows] + [False, False], device=DEVICE)
        twin.append(own.slot[kept].long(), own.position[kept] + 1, drawn[kept])
        for name in ("tokens", "end", "fixed"):
            assert torch.equal(getattr(mine, name), getattr(twin, name)), name
        for slot, _, count in rows:
            position[slot] += count
