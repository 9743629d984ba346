"""Durations of steps, on a manual clock."""

from __future__ import annotations

import tracemalloc

import pytest

from baton.engine.step_times import StepTimes


class Loop:
    """A loop whose steps take a given time, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tokens = 0
        self.times = StepTimes(lambda: self.now)

    def step(self, ms: float, tokens: int) -> None:
        self.now += ms / 1e3
        self.tokens += tokens
        self.times.add(ms / 1e3, self.tokens)


def test_the_longest_of_the_latest_steps_is_expected() -> None:
    times = StepTimes()
    assert times.expected_s == 0.0
    for seconds in (0.01, 0.5, 0.02):
        times.add(seconds)
    assert times.expected_s == 0.5
    for _ in range(8):
        times.add(0.03)
    assert times.expected_s == 0.03


def test_only_the_last_second_counts() -> None:
    loop = Loop()
    for _ in range(50):
        loop.step(10, 7)
    loop.now += 0.905
    for ms in (20.0, 40.0):
        loop.step(ms, 3)
    recent = loop.times.recent()
    # 965 ms have passed since the fifty: those that ended in the last 35 ms before are still in.
    assert recent.steps == 2 + 4
    assert recent.tokens == 2 * 3 + 4 * 7
    assert recent.mean_ms == pytest.approx((20 + 40 + 4 * 10) / 6)
    assert recent.p99_ms == pytest.approx(40)
    assert loop.times.busy_s == pytest.approx(0.56)
    loop.now += 2
    assert loop.times.recent() == (0, 0, 0.0, 0.0)


def test_only_the_steps_of_a_second_are_stored() -> None:
    loop, taken = Loop(), list[int]()
    tracemalloc.start()
    for _ in range(2):
        for _ in range(5000):
            loop.step(1.25, 1)
        taken.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert taken[1] - taken[0] < 5000 * 8, "less than a number for each step"
    assert loop.times.recent().steps == loop.times.recent().tokens == pytest.approx(800, abs=1)
    loop.now += 2
    loop.step(1.25, 1)
    assert loop.times.recent().tokens == 1


def test_steps_that_end_together_share_the_time() -> None:
    loop = Loop()
    loop.step(3, 10)
    loop.now += 0.004
    loop.times.add(0.002, 30, steps=2)
    recent = loop.times.recent()
    assert (recent.steps, recent.tokens) == (3, 30)
    assert recent.mean_ms == pytest.approx(7 / 3)
    assert loop.times.busy_s == pytest.approx(0.007)
    assert loop.times.expected_s == 0.003


def test_a_step_that_is_timed_at_the_start_is_expected_and_does_not_count() -> None:
    loop = Loop()
    loop.times.add(0.02, steps=0)
    assert loop.times.expected_s == loop.times.typical_s == 0.02
    assert (loop.times.busy_s, loop.times.recent().steps) == (0, 0)
