"""Acceptance of recent drafts, from the lines of progress."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.speculation.draft_rates import DraftRates

SLOTS, DEPTHS = 4, 3


class Steps:
    """Publishes steps of 10 ms; the slots' sequences get `accepted` of `drafts` drafts, by slot."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        rings = SharedRings(SLOTS, rows_per_slot=1 + DEPTHS)
        self.progress = rings.progress(SharedMemory.create("rings", rings.size))
        self.now, self.budgets = 0.0, np.full(SLOTS, DEPTHS)
        self.generations, self.rows = [1] * SLOTS, 0
        self.rates = DraftRates(self.progress, StepShape(SLOTS, 1 + DEPTHS), clock or (lambda: self.now))

    def run(self, slots: dict[int, tuple[int, int]], *, steps: int = 1, seen_together: int = 1) -> None:
        for step in range(steps):
            self.now += 0.01
            generations = [self.generations[slot] for slot in slots]
            counts = [(1, drafts, accepted, 0, 0) for drafts, accepted in slots.values()]
            self.progress.publish(list(slots), generations, [step] * len(slots), counts)
            if (step + 1) % seen_together == 0:
                drafts = any(given for given, _ in slots.values())
                rows = self.rows or len(slots) * (1 + DEPTHS)
                sequences = self.rates.observe(
                    rows if drafts else len(slots), drafts=drafts, budgets=self.budgets
                )
                assert sequences == len(slots)

    def accepted(self, *slots: int) -> Any:
        return self.rates.accepted(np.array(slots))


@pytest.mark.parametrize("seen_together", [1, 5])
def test_acceptance_is_by_slot_and_depth(seen_together: int) -> None:
    steps = Steps()
    steps.run({0: (3, 3), 1: (3, 1), 2: (3, 0)}, steps=300, seen_together=seen_together)
    right, first, wrong = steps.accepted(0, 1, 2)
    assert right == pytest.approx([1, 1, 1], abs=0.05)
    assert first == pytest.approx([1, 0, 0], abs=0.05)
    assert wrong == pytest.approx([0, 0, 0], abs=0.05)


def test_a_new_acceptance_is_believed_within_two_seconds() -> None:
    steps = Steps()
    steps.run({0: (1, 1)}, steps=300)
    steps.run({0: (1, 0)}, steps=200)
    assert steps.accepted(0)[0, 0] < 0.2
    steps.run({0: (1, 1)}, steps=200)
    assert steps.accepted(0)[0, 0] > 0.8


def test_steps_without_drafts_say_nothing_about_acceptance() -> None:
    steps = Steps()
    steps.run({0: (1, 0)}, steps=300)
    before = steps.accepted(0, -1)
    steps.run({0: (0, 0)}, steps=1000)
    np.testing.assert_array_equal(steps.accepted(0, -1), before)


def test_a_single_step_after_a_long_time_does_not_decide() -> None:
    steps = Steps()
    steps.run({0: (1, 0)}, steps=300)
    steps.now += 100
    steps.run({0: (1, 1)})
    assert steps.accepted(0)[0, 0] < 0.1


def test_a_new_sequence_is_expected_to_be_like_the_others() -> None:
    steps = Steps()
    steps.run({0: (3, 3), 1: (3, 3), 2: (3, 0)}, steps=300)
    steps.generations[2] = 2
    steps.run({2: (0, 0)})
    assert 0.5 < steps.accepted(2)[0, 0] < 0.8
    assert steps.rates.tokens_a_step > 1.5, "its own tokens of a step are not known yet"


def test_slots_without_drafts_are_known_to_have_none() -> None:
    steps = Steps()
    steps.run({0: (3, 3), 1: (0, 0)}, steps=300)
    busy, idle = steps.rates.drafted(np.array([0, 1]))
    assert busy == pytest.approx([1, 1, 1], abs=0.05)
    assert idle == pytest.approx([0, 0, 0], abs=0.05)


def test_what_a_slot_may_not_have_says_nothing() -> None:
    """The slot had right drafts and may have none now, or fewer."""
    steps = Steps()
    steps.run({0: (3, 3), 1: (3, 3)}, steps=300)
    before = steps.accepted(0), steps.rates.drafted(np.array([0]))
    steps.budgets = np.array([0, 2, 3, 3])
    steps.run({0: (0, 0), 1: (2, 1)}, steps=300)
    np.testing.assert_array_equal(steps.accepted(0), before[0])
    np.testing.assert_array_equal(steps.rates.drafted(np.array([0])), before[1])
    assert steps.accepted(1) == pytest.approx(np.array([[1, 0, 0]]), abs=0.06)
    assert steps.rates.drafted(np.array([1])) == pytest.approx(np.ones((1, 3)), abs=0.05)
    steps.budgets = np.array([1, 3, 3, 3])
    steps.run({0: (0, 0), 1: (3, 3)}, steps=300)
    assert steps.rates.drafted(np.array([0])) == pytest.approx(np.array([[0, 1, 1]]), abs=0.05)


def test_what_slots_had_no_room_for_says_nothing() -> None:
    """Six rows of four slots: two have a draft, and the others might have had none."""
    steps = Steps()
    steps.run(dict.fromkeys(range(SLOTS), (3, 3)), steps=300)
    steps.rows = 6
    steps.run({0: (1, 1), 1: (1, 1), 2: (0, 0), 3: (0, 0)}, steps=300)
    np.testing.assert_allclose(steps.rates.drafted(np.arange(4)), 1, atol=0.05)
    assert steps.accepted(2)[0, 0] == pytest.approx(1, abs=0.05)
    # With these budgets it is sure that the other two had room for both.
    steps.budgets = np.array([0, 0, 1, 1])
    steps.run({0: (0, 0), 1: (0, 0), 2: (0, 0), 3: (1, 0)}, steps=300)
    assert steps.rates.drafted(np.arange(4))[:, 0] == pytest.approx([1, 1, 0, 1], abs=0.05)
    assert steps.accepted(0, 2, 3)[:, 0] == pytest.approx([1, 0, 0], abs=0.05)


def test_tokens_a_step_are_the_lower_quartile_of_those_that_run() -> None:
    steps = Steps()
    assert steps.rates.tokens_a_step == 1
    steps.run({0: (3, 3), 1: (3, 2), 2: (3, 2), 3: (3, 1)}, steps=500)
    # Of 2, 3, 3 and 4 tokens.
    assert steps.rates.tokens_a_step == pytest.approx(2.75, abs=0.02)
    assert steps.rates.rows_a_sequence == pytest.approx(4, abs=0.02)
    steps.run({0: (3, 3)}, steps=100)
    assert steps.rates.tokens_a_step == pytest.approx(4, abs=0.02)
    steps.run({0: (0, 0), 3: (0, 0)}, steps=500)
    assert (steps.rates.tokens_a_step, steps.rates.rows_a_sequence) == pytest.approx((1, 1), abs=0.02)


def test_tokens_a_step_follow_a_change_within_two_seconds() -> None:
    steps = Steps()
    for accepted in (3, 0, 3):
        steps.run(dict.fromkeys(range(SLOTS), (3, accepted)), steps=400)
        assert steps.rates.tokens_a_step == pytest.approx(1 + accepted, rel=0.1)


def test_a_thread_that_waits_for_its_turn_while_it_counts() -> None:
    """Longer than sequences count as running."""
    times = itertools.count(10.0)
    steps = Steps(lambda: next(times))
    steps.run({0: (3, 3)})
    assert steps.rates.ran == 1
    assert steps.rates.tokens_a_step > 1
