"""The next decode step, from what is known of slots and queue alone."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from baton.engine.plan.decode_rows import batches_of, draft_batches_up_to, next_rows, rows_to_mix
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.shared_memory.mailbox import Feature
from baton.engine.shared_memory.step_shape import StepShape


def state(**known: Any) -> DecodeState:
    """A state of 24 slots, of which three advance."""
    made = DecodeState(StepShape(24), (1, 2, 4, 8, 16, 24), (16, 24))
    fields = {"active": 3, "moves": True, "features": int(Feature.GREEDY)} | known
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("known", "rows"),
    [
        ({}, DecodeRows(4)),
        ({"active": 0, "moves": False}, None),
        ({"moves": False}, None),
        ({"moves": False, "posted": 7, "applied": 6}, DecodeRows(4)),
        ({"arriving": range(1)}, DecodeRows(4)),
        ({"arriving": range(2)}, DecodeRows(8)),
        ({"arriving": range(100)}, DecodeRows(8)),
        ({"active": 22, "arriving": range(100)}, DecodeRows(24)),
        ({"features": int(Feature.TEMPERATURE | Feature.FILTERS)}, DecodeRows(4, simple=False)),
        ({"room": False}, None),
        ({"room": False, "launched": 1}, DecodeRows(4)),
        ({"launched": 1}, DecodeRows(4)),
        ({"launched": 2}, None),
        ({"launched": 2, "typical_s": 0.0019}, DecodeRows(4)),
        ({"launched": 3, "typical_s": 0.0019}, None),
        ({"launched": 2, "typical_s": 0.0021}, None),
    ],
)
def test_when_a_step_is_launched_and_with_how_many_rows(
    known: dict[str, Any], rows: DecodeRows | None
) -> None:
    assert next_rows(state(**known)) == rows


def test_admissions_count_until_a_step_is_known_to_have_applied_them() -> None:
    made = state(active=4)
    made.admissions.append((7, int(Feature.PENALTIES)))
    made.posted = 7
    assert next_rows(made) == DecodeRows(8, simple=False)
    made.saw(active=4, features=int(Feature.GREEDY), applied=7, ended=1, moves=True)
    assert next_rows(made) == DecodeRows(4)


@pytest.mark.parametrize(
    ("launched", "ended", "mixed_at", "is_planned"),
    [
        (0, 0, 0, True),
        (1, 0, 0, False),
        # The first shares the prefill step's launch and has not ended: one more may stand behind it,
        (1, 0, 1, True),
        (2, 0, 1, False),
        # and when it has ended, that one takes its place.
        (2, 1, 1, False),
    ],
)
def test_a_prefill_step_takes_the_place_of_a_decode_step(
    launched: int, ended: int, mixed_at: int, *, is_planned: bool
) -> None:
    made = state(launched=launched, ended=ended, mixed_at=mixed_at)
    assert (next_rows(made, behind_prefill=True) is not None) is is_planned


@pytest.mark.parametrize(
    ("known", "rows"),
    [
        ({}, DecodeRows(16)),
        ({"active": 17}, DecodeRows(24)),
        ({"launched": 2}, DecodeRows(16)),
        ({"moves": False}, None),
        ({"room": False}, None),
        ({"features": int(Feature.FILTERS)}, None),
        ({"mixed_batches": ()}, None),
    ],
)
def test_which_rows_may_share_a_launch_with_prompts(known: dict[str, Any], rows: DecodeRows | None) -> None:
    assert rows_to_mix(state(**known)) == rows


def test_steps_that_no_plan_launched_are_not_queued_ones() -> None:
    made = state()
    made.saw(active=3, features=0, applied=0, ended=5, moves=True)
    assert (made.launched, made.queued) == (5, 0)


@pytest.mark.parametrize(
    ("known", "rows"),
    [
        ({"active": 1}, DecodeRows(8, drafts=True)),
        ({"active": 3}, DecodeRows(16, drafts=True)),
        ({"features": int(Feature.BIAS | Feature.DRAFTS)}, DecodeRows(16, simple=False, drafts=True)),
        ({"arriving": range(2)}, DecodeRows(32, drafts=True)),
        ({"active": 24}, DecodeRows(32, drafts=True)),  # of which not all have four rows
        ({"active": 24, "draft_batches": (8, 16)}, DecodeRows(24)),  # which leaves none for drafts
        ({"draft_batches": ()}, DecodeRows(4)),
        ({"features": int(Feature.GREEDY)}, DecodeRows(4)),  # of slots that may have none
        ({"features": 0, "admissions": deque([(1, int(Feature.MASKED))])}, DecodeRows(4, simple=False)),
        ({"features": 0, "admissions": deque([(1, int(Feature.DRAFTS))])}, DecodeRows(16, drafts=True)),
    ],
)
def test_steps_with_drafts_have_room_for_as_many_as_slots_may_have(
    known: dict[str, Any], rows: DecodeRows
) -> None:
    features = int(Feature.GREEDY | Feature.DRAFTS)
    drafting = {"shape": StepShape(24, 4), "draft_batches": (8, 16, 32), "features": features}
    made = state(**(drafting | known))
    assert next_rows(made) == rows


def test_steps_that_join_prompts_have_no_drafts() -> None:
    features = int(Feature.GREEDY | Feature.DRAFTS)
    rows = rows_to_mix(state(shape=StepShape(24, 4), draft_batches=(8, 16, 32), features=features))
    assert rows is not None
    assert not rows.drafts


def test_there_are_few_batches_with_drafts() -> None:
    assert draft_batches_up_to(StepShape(256, 8)) == [8, 16, 32, 64, 96, 128, 192, 256]
    assert draft_batches_up_to(StepShape(5, 3)) == [8, 15]
    assert draft_batches_up_to(StepShape(300, 8))[-1] == 256
    assert draft_batches_up_to(StepShape(256)) == []
    assert batches_of(StepShape(24, 4)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96]
