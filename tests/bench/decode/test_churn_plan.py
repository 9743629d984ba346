"""Plans of joins: seeded, Poisson, of the lengths they promise."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from bench.decode.churn_plan import (
    CANCELLED,
    LONGEST,
    SHORTEST,
    StepTime,
    joins,
    mean_age,
    mean_steps,
    slots_for,
    standing,
)


def test_one_seed_is_one_plan() -> None:
    assert list(islice(joins(3, 50.0), 200)) == list(islice(joins(3, 50.0), 200))
    assert list(islice(joins(3, 50.0), 200)) != list(islice(joins(4, 50.0), 200))
    assert standing(3, 16) == standing(3, 16)


def test_gaps_are_exponential_lengths_bounded_and_some_leave_early() -> None:
    plan = list(islice(joins(7, 50.0), 5000))
    gaps = [b.at - a.at for a, b in pairwise(plan)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.07)
    assert {min(join.output for join in plan), max(join.output for join in plan)} == {SHORTEST, LONGEST}
    early = [join for join in plan if join.cancel_after is not None]
    assert len(early) / len(plan) == pytest.approx(CANCELLED, abs=0.02)
    assert all(1 <= join.steps < join.output - 1 for join in early)
    assert fmean(join.steps for join in plan) == pytest.approx(mean_steps(), rel=0.05)


def test_the_rate_keeps_the_batch_busy() -> None:
    """Joins at batch / mean steps, a step being a unit of time; counted after all have come and gone once."""
    plan = list(islice(joins(5, 64 / mean_steps()), 20_000))
    middle = plan[len(plan) // 2].at
    times = [middle + step for step in range(0, 2000, 20)]
    busy = [sum(join.at <= at < join.at + join.steps for join in plan) for at in times]
    assert fmean(busy) == pytest.approx(64, rel=0.06)
    assert max(busy) <= slots_for(64)


def test_time_in_steps_follows_the_steps_and_runs_on_between_them() -> None:
    """Believed to take 10 ms, they take 20: soon it counts with that, and no time comes twice."""
    clock, seen = StepTime(100.0, 1000, pace=100.0), []
    for millisecond in range(1, 20_001):
        now = 100.0 + millisecond / 1e3
        seen.append(clock.at(now, 1000 + millisecond // 20))
    assert all(a < b for a, b in pairwise(seen))
    assert seen[-1] == pytest.approx(1000, rel=0.06)
    late = [b - a for a, b in pairwise(seen[5000:])]
    assert fmean(late) == pytest.approx(1 / 20, rel=0.02)
    assert max(late) < 1.05 / 20


def test_who_stands_there_at_the_beginning_is_met_midway() -> None:
    plan = standing(2, 400)
    assert len(plan) == len({join.number for join in plan}) == 400
    assert all(join.number < 0 and join.cancel_after is None for join in plan)
    lengths = [join.steps for join in plan]
    assert min(lengths) >= 1
    # Half of E[steps²] / E[steps]: as much is left of a stay that is met at a random time as is over.
    sample = [join.steps for join in islice(joins(9, 1.0), 20_000)]
    assert mean_age() == pytest.approx(fmean(s * s for s in sample) / fmean(sample) / 2, rel=0.05)
    assert fmean(lengths) == pytest.approx(mean_age(), rel=0.15)
