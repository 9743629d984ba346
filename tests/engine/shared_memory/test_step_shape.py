"""What a step may have: rows, words of the ring, tokens."""

from __future__ import annotations

import pytest

from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.step_shape import StepShape


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_slots_times_rows_a_slot(rows: int) -> None:
    shape = StepShape(8, rows)
    assert (shape.rows, shape.rows_of(3)) == (8 * rows, 3 * rows)
    assert shape.words == 8 * rows + 8
    assert [shape.slots_of(n) for n in (3 * rows - 1, 3 * rows)] == [2, 3]


@pytest.mark.parametrize("slots", [1, 3, 256])
def test_a_ring_holds_many_steps(slots: int) -> None:
    assert SharedRings(slots).ring_words >= 32 * StepShape(slots).words
