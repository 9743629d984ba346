"""The mean of recent requests that all processes of a router share."""

from __future__ import annotations

import random

import pytest

from services.router.workers.recent_mean import REQUESTS, RecentMean, Sum


def test_processes_that_report_to_each_other_have_one_mean() -> None:
    """Whichever of them observes how much; reports come late, and some are lost."""
    draw = random.Random(3)
    processes = [RecentMean(1.0, 16) for _ in range(3)]
    for _ in range(2000):
        index = draw.choices(range(3), (20, 5, 1))[0]
        processes[index].observe(draw.gauss(1.2, 0.02))
        for other, mean in enumerate(processes):
            if other != index and draw.random() < 0.5:
                mean.take(index, processes[index].own)
    for index, other in ((i, j) for i in range(3) for j in range(3) if i != j):
        processes[other].take(index, processes[index].own)
    assert [mean.value for mean in processes] == pytest.approx([1.2] * 3, abs=0.008)
    assert max(mean.value for mean in processes) - min(mean.value for mean in processes) < 0.004
    assert sum(mean.own.number for mean in processes) == 2000


def test_a_process_that_starts_takes_what_the_others_have_observed() -> None:
    old, new = RecentMean(1.0, 16), RecentMean(1.0, 16)
    for _ in range(10 * REQUESTS):
        old.observe(1.1)
    new.take(0, old.own)
    assert new.value == pytest.approx(1.1, abs=0.02)
    assert new.own == Sum()


def test_the_sum_of_a_replaced_sibling_begins_again() -> None:
    mean = RecentMean()
    mean.take(1, Sum(4, 4.0))
    mean.take(1, Sum(4, 4.0))
    assert mean.value == 1.0
    mean.take(1, Sum(1, 6.0))
    assert mean.value == pytest.approx(2.0)
