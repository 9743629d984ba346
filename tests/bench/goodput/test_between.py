"""The rate at the goal, between those that were measured."""

from __future__ import annotations

import pytest

from bench.goodput.report import Between, cross
from loadgen.analysis.steady import Steadiness
from loadgen.goodput.probe import Probe, Verdict

GOAL = 0.9


def probe(rate: float, share: float, requests: int = 100, *, growing: bool = False) -> Probe:
    verdict = Verdict.UNSTABLE if growing else Verdict.PASS if share >= GOAL else Verdict.FAIL
    steadiness = Steadiness.GROWING if growing else Steadiness.STEADY
    return Probe(rate, rate, 30.0, requests, share, 9.0, 0.0, 1.0, steadiness, verdict)


def test_on_the_line_between_both_neighbours() -> None:
    found = cross([probe(20, 0.5), probe(10, 1.0), probe(5, 1.0)], GOAL)
    assert found.rate == pytest.approx(12)
    assert found[1:] == (10, 20)


def test_rates_that_all_meet_the_goal_or_none() -> None:
    assert cross([probe(10, 0.9), probe(5, 1.0)], GOAL) == Between(10, 10, None)
    assert cross([probe(10, 0.8), probe(5, 0.89)], GOAL) == Between(5, None, 5)


def test_of_neighbours_in_the_wrong_order_the_mean_counts() -> None:
    """The mean is taken by requests: with 3 of 4 the mean of 0.86 and 0.98 meets the goal, with 1 of 4 it
    does not."""
    assert cross([probe(10, 0.86, 25), probe(12, 0.98, 75)], GOAL) == Between(12, 12, None)
    assert cross([probe(10, 0.86, 75), probe(12, 0.98, 25)], GOAL) == Between(10, None, 10)


def test_what_would_not_last_does_not_meet_the_goal() -> None:
    """The rate's requests came in time only since the run was short."""
    assert cross([probe(10, 1.0), probe(20, 0.97, growing=True)], GOAL).rate == pytest.approx(20)
    assert cross([probe(10, 1.0), probe(20, 0.4, growing=True)], GOAL).rate == pytest.approx(10 + 10 / 6)
