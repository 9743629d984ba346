"""Drafts that get rows, and the tokens they bring, against all ways to give rows out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.engine.speculation.ranked_drafts import Floats, RankedDrafts


def test_the_likeliest_come_first_and_of_equals_first_drafts_before_second_ones() -> None:
    accepted, drafted = np.array([[0.5, 0.25], [0.2, 0.1], [0.5, 0.25]]), np.ones((3, 2))
    drafts = RankedDrafts(accepted, drafted)
    assert drafts.tokens(-1).tolist() == drafts.tokens(0).tolist() == [1, 1, 1]
    assert drafts.tokens(1) == pytest.approx([1.5, 1, 1])
    assert drafts.tokens(2.5) == pytest.approx([1.625, 1, 1.5])
    assert drafts.tokens(4) == pytest.approx([1.75, 1, 1.75])
    assert drafts.tokens(5) == pytest.approx([1.75, 1.2, 1.75])
    assert drafts.tokens(9) == pytest.approx([1.75, 1.3, 1.75])
    assert drafts.budgets(0).tolist() == [0, 0, 0]
    assert drafts.budgets(4).tolist() == [2, 0, 2]
    assert drafts.budgets(4.1).tolist() == [2, 1, 2]
    assert drafts.budgets(9).tolist() == [2, 2, 2]


def test_drafts_that_are_rarely_there_need_few_rows() -> None:
    """One in four steps has a draft, and then a right one."""
    drafts = RankedDrafts(np.array([[0.25], [0.9]]), np.array([[0.25], [1.0]]))
    assert drafts.tokens(0.25) == pytest.approx([1.25, 1])
    assert drafts.tokens(0.75) == pytest.approx([1.25, 1.45])
    assert drafts.budgets(0.3).tolist() == [1, 1]


def test_a_draft_that_is_there_only_where_it_is_right_does_not_come_before_the_one_before_it() -> None:
    """A long match bears out several drafts, which then are right more often than the first ones of all."""
    drafts = RankedDrafts(np.array([[0.3, 0.2], [0.5, 0.1]]), np.array([[1.0, 0.2], [1.0, 1.0]]))
    assert drafts.budgets(1).tolist() == [0, 1]
    assert drafts.budgets(1.5).tolist() == [1, 1]
    assert drafts.budgets(2.1).tolist() == [2, 1]


def test_slots_without_drafts_need_none() -> None:
    drafts = RankedDrafts(np.array([[0.0, 0.0], [0.4, 0.1]]), np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert drafts.tokens(1) == pytest.approx([1, 1.4])
    assert drafts.tokens(2) == pytest.approx([1, 1.5])


@pytest.mark.parametrize("seed", range(8))
def test_no_other_way_brings_more_tokens(seed: int) -> None:
    """The comparison is of drafts that each step has."""
    draw = np.random.default_rng(seed)
    count, depths = 3, 3
    accepted: Floats = draw.uniform(0, 1, (count, depths)).cumprod(axis=1, dtype=np.float64)
    drafts = RankedDrafts(accepted, np.ones((count, depths)))
    for spare in range(count * depths + 1):
        ways = [way for way in itertools.product(range(depths + 1), repeat=count) if sum(way) <= spare]
        gains = [sum(accepted[n, :most].sum() for n, most in enumerate(way)) for way in ways]
        assert drafts.tokens(spare).sum() == pytest.approx(count + max(gains))
        assert tuple(drafts.budgets(spare)) == ways[int(np.argmax(gains))]


def test_many_that_are_worth_the_same_get_rows_by_depth() -> None:
    drafts = RankedDrafts(np.tile([0.5, 0.5, 0.2], (40, 1)), np.ones((40, 3)))
    assert drafts.budgets(40).tolist() == [1] * 40
    assert drafts.budgets(50).tolist() == [2] * 10 + [1] * 30
    assert drafts.tokens(80) == pytest.approx(2)
