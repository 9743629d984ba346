"""Prompts that go before another one at a worker, and the time at which it begins."""

from __future__ import annotations

import pytest

from baton.base.prefill_defaults import ALONE_STEP_S
from services.router.workers.backlog import MOST_PROMPTS, Backlog, BacklogPart, Prompt, seconds_by_length


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backlog(clock: Clock) -> Backlog:
    return Backlog(clock)


def test_the_sum_shrinks_with_the_clock_and_at_the_end_of_a_prompt(backlog: Backlog, clock: Clock) -> None:
    first, second = backlog.add(0.2), backlog.add(0.3)
    assert backlog.wait_s == pytest.approx(0.5)
    clock.now += 0.1
    assert backlog.wait_s == pytest.approx(0.4)
    backlog.ended(first)
    assert backlog.wait_s == pytest.approx(0.3)
    backlog.ended(first)
    backlog.ended(second)
    assert backlog.wait_s == 0


def test_what_was_computed_grows_with_the_clock_and_at_the_end_of_a_prompt(
    backlog: Backlog, clock: Clock
) -> None:
    backlog.set_siblings(BacklogPart(added_s=5.0))
    first = backlog.add(0.2)
    backlog.add(0.3)
    assert backlog.computed_s == pytest.approx(5.0)
    clock.now += 0.1
    assert backlog.computed_s == pytest.approx(5.1)
    backlog.ended(first)
    assert backlog.computed_s == pytest.approx(5.2)
    backlog.set_siblings(BacklogPart(added_s=5.4, unfinished_s=0.4, left=seconds_by_length([0.4])))
    assert backlog.computed_s == pytest.approx(5.2)
    clock.now += 1.0
    assert backlog.computed_s == pytest.approx(5.9)


def test_prompts_that_have_not_ended_in_the_time_predicted_are_overdue(
    backlog: Backlog, clock: Clock
) -> None:
    first, second = backlog.add(0.2), backlog.add(0.3)
    assert backlog.overdue_s == 0
    clock.now += 0.9
    assert backlog.overdue_s == pytest.approx(0.4)
    backlog.ended(first)
    assert backlog.overdue_s == pytest.approx(0.4)
    third = backlog.add(0.1)
    assert backlog.overdue_s == 0
    clock.now += 0.3
    assert backlog.overdue_s == pytest.approx(0.2)
    backlog.set_siblings(BacklogPart(0.1, 0.1, seconds_by_length([0.1])))
    assert backlog.overdue_s == 0
    clock.now += 0.3
    backlog.set_siblings(BacklogPart(0.1, 0.1, seconds_by_length([0.05])))
    assert backlog.overdue_s == pytest.approx(0.2), "nothing was added"
    backlog.ended(second)
    backlog.ended(third)
    assert backlog.overdue_s == 0


def test_a_short_prompt_goes_before_a_long_one_and_waits_for_a_step(backlog: Backlog) -> None:
    backlog.add(0.3, 8000)
    backlog.add(0.02, 700)
    wait = backlog.wait_of(0.05)
    assert wait.wait_s == pytest.approx(0.02 + ALONE_STEP_S)
    assert wait.tokens_behind == 8000
    assert backlog.wait_of(0.3).wait_s == pytest.approx(0.32), "those that came first, of two alike"
    assert backlog.wait_of(0.3).tokens_behind == 0


def test_what_has_been_computed_is_of_the_oldest(backlog: Backlog, clock: Clock) -> None:
    backlog.add(0.3, 8000)
    clock.now += 0.29
    assert backlog.wait_of(0.05).wait_s == pytest.approx(0.01), "what is left of it is shorter"


def test_a_long_prompt_that_is_due_goes_before_a_short_one_that_is_not(backlog: Backlog) -> None:
    backlog.add(0.3, 8000, left_s=0.4)
    assert backlog.wait_of(0.1, left_s=1.0).wait_s == pytest.approx(0.3)
    assert backlog.wait_of(0.1).wait_s == pytest.approx(0.3)
    backlog.add(0.3, 8000, left_s=0.2)
    assert backlog.wait_of(0.1, left_s=1.0).wait_s == pytest.approx(0.3 + ALONE_STEP_S), "late in any case"


def test_a_prompt_with_a_tight_limit_goes_before_shorter_ones_that_have_time(backlog: Backlog) -> None:
    for _ in range(10):
        backlog.add(0.05, 500, left_s=3.0)
    assert backlog.wait_of(0.1, left_s=2.0).wait_s == pytest.approx(0.5)
    assert backlog.wait_of(0.1, left_s=0.3).wait_s == pytest.approx(ALONE_STEP_S)


def test_none_that_was_let_in_is_given_up_for_one_that_comes(backlog: Backlog) -> None:
    backlog.add(0.3, 8000, left_s=0.5)
    assert backlog.wait_of(0.01, left_s=0.3).wait_s == pytest.approx(ALONE_STEP_S)
    assert backlog.wait_of(0.2, left_s=0.3).wait_s == pytest.approx(0.3), "both cannot be in time"


def test_prompts_of_the_queue_count_by_their_length(backlog: Backlog) -> None:
    queued = [Prompt(0.1, 0, float("inf"), 0.2), Prompt(0.01, 0, float("inf"), 0.02)]
    assert backlog.wait_of(0.05, queued=queued).wait_s == pytest.approx(0.01 + ALONE_STEP_S)


def test_of_many_prompts_only_the_sum_counts(backlog: Backlog) -> None:
    backlog.set_siblings(BacklogPart(0.5, 0.5, seconds_by_length([0.5])))
    for _ in range(2 * MOST_PROMPTS + 1):
        backlog.add(0.1, 100)
    assert backlog.wait_of(0.01).wait_s == pytest.approx(0.5 + 0.1 * (2 * MOST_PROMPTS + 1))
    assert backlog.wait_of(0.01).tokens_behind == 0


def test_prompts_of_siblings_count_by_length(backlog: Backlog) -> None:
    """Prompts of 4 to 8 ms go before one of 6, and long ones delay it by a step; those due earlier may
    all."""
    left = seconds_by_length([0.005] * 4 + [0.3])
    backlog.set_siblings(BacklogPart(0.32, 0.32, left), tokens=3200)
    wait = backlog.wait_of(0.006)
    assert wait.wait_s == pytest.approx(0.02 + ALONE_STEP_S)
    assert wait.tokens_behind == 3000
    assert backlog.wait_of(0.3).wait_s == pytest.approx(0.32)
    assert backlog.wait_of(0.006, left_s=0.05).wait_s == pytest.approx(0.32)


def test_time_that_passes_is_spent_on_the_prompts_of_all_processes(backlog: Backlog, clock: Clock) -> None:
    """Not on those of each; and one that ends at a sibling while another one comes is replaced by that."""

    def of_siblings(added_s: float, *unfinished: float) -> None:
        left = seconds_by_length(unfinished)
        backlog.set_siblings(BacklogPart(added_s, sum(unfinished), left))

    own = backlog.add(0.1)
    of_siblings(0.1, 0.1)
    assert backlog.wait_s == pytest.approx(0.2)
    clock.now += 0.1
    assert backlog.wait_s == pytest.approx(0.1)
    assert sum(backlog.own.left) == pytest.approx(0.05), "whose turn it was is not known"
    backlog.ended(own)
    assert backlog.wait_s == pytest.approx(0.1)
    of_siblings(0.2, 0.1)
    assert backlog.wait_s == pytest.approx(0.1), "its first one has ended"
    of_siblings(0.2)
    assert backlog.wait_s == 0
    of_siblings(0.0)  # another process in its place
    of_siblings(0.05, 0.05)
    assert backlog.wait_s == pytest.approx(0.05)
