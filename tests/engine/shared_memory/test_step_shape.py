"""Limits of a step's shape: rows, words of the ring, tokens."""

from __future__ import annotations

import pytest

from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.step_shape import StepShape


@pytest.mark.parametrize(
    ("slots", "rows_per_slot", "rows"),
    [(8, 1, 8), (8, 4, 32), (1, 8, 8), (32, 8, 256), (33, 8, 256), (256, 8, 256), (300, 8, 300)],
)
def test_drafts_have_rows_up_to_256_in_all(slots: int, rows_per_slot: int, rows: int) -> None:
    shape = StepShape(slots, rows_per_slot)
    assert (shape.rows, shape.words) == (rows, rows + slots)


@pytest.mark.parametrize(("slots", "rows_per_slot"), [(0, 1), (4, 0), (4, 9)])
def test_sizes_that_no_step_has_are_refused(slots: int, rows_per_slot: int) -> None:
    with pytest.raises(ValueError, match="1 to 8 rows each"):
        StepShape(slots, rows_per_slot)


@pytest.mark.parametrize("rows_per_slot", [1, 8])
@pytest.mark.parametrize("slots", [1, 3, 256])
def test_a_ring_holds_many_steps(slots: int, rows_per_slot: int) -> None:
    shape = StepShape(slots, rows_per_slot)
    assert SharedRings(slots, rows_per_slot=rows_per_slot).ring_words >= 32 * shape.words
