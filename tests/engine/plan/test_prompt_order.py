"""Prompts that are due before shorter ones, by arithmetic."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.plan.prompt_order import Prompt, in_order
from baton.engine.sequence import Limits, SamplingParams, Sequence

STEP_S = 1.0


def prompt(left_s: float, due_s: float = math.inf) -> Prompt:
    return Prompt(Sequence((1,), 1, SamplingParams(), Limits(1)), left_s, due_s)


def order(*prompts: Prompt, share: float = 1.0) -> list[int]:
    """The places of the prompts, of which the shortest is given first."""
    return [
        next(place for place, one in enumerate(prompts) if one.sequence is sequence)
        for sequence in in_order(list(prompts), STEP_S, share)
    ]


def test_the_shortest_comes_first_as_long_as_nothing_is_late_for_it() -> None:
    assert order(prompt(1), prompt(2), prompt(3)) == [0, 1, 2]
    assert order(prompt(1), prompt(2, due_s=3)) == [0, 1]
    assert order(prompt(1), prompt(2, due_s=2.9)) == [1, 0]
    assert order(prompt(1), prompt(2, due_s=4), share=0.5) == [1, 0], "it may count on half of the time"


def test_what_cannot_be_met_has_no_precedence() -> None:
    assert order(prompt(1), prompt(2, due_s=1.9)) == [0, 1]
    assert order(prompt(1, due_s=9), prompt(3, due_s=3.5), prompt(4, due_s=4)) == [1, 0, 2]


def test_only_a_step_is_taken_by_a_long_prompt() -> None:
    assert order(prompt(0.2), prompt(0.3, 0.5), prompt(9), prompt(9.5, due_s=11)) == [0, 1, 3, 2]
    assert order(prompt(0.2), prompt(9), prompt(9.5, due_s=11)) == [0, 1, 2]


@settings(deadline=None, max_examples=60)
@given(
    limited=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=6),
    others=st.lists(st.integers(1, 30), max_size=6),
)
def test_limits_that_can_all_be_met_are_met(limited: list[tuple[int, int]], others: list[int]) -> None:
    """Without further arrivals. `limited`: eighths of a second that each takes, and by how much the time
    until it is due exceeds what it takes together with those before it."""
    total, prompts = 0.0, [prompt(eighths / 8) for eighths in others]
    for eighths, more in sorted(limited, key=lambda one: one[1]):
        total += eighths / 8
        prompts.append(prompt(eighths / 8, total + more / 8))
    left = {one.sequence: one.left_s for one in prompts}
    due = {one.sequence: one.due_s for one in prompts}
    now = 0.0
    while left:
        waiting = sorted(left, key=left.__getitem__)
        spare = STEP_S
        for sequence in in_order([Prompt(one, left[one], due[one] - now) for one in waiting], STEP_S):
            part = min(left[sequence], spare)
            left[sequence], spare, now = left[sequence] - part, spare - part, now + part
            if not left[sequence]:
                del left[sequence]
                assert now <= due[sequence]
