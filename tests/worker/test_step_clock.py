"""Step times of the last second, with a clock turned by hand."""

from __future__ import annotations

import pytest

from services.worker.step_clock import StepClock


class Loop:
    """A loop whose steps take as long as they are told, and its clock."""

    def __init__(self) -> None:
        self.now = 0
        self.tokens = 0
        self.clock = StepClock(lambda: self.tokens, lambda: self.now)

    def step(self, ms: float, tokens: int, did: bool = True) -> None:
        def run() -> bool:
            self.now += round(ms * 1e6)
            self.tokens += tokens
            return did

        assert self.clock.timed(run) is did


def test_only_the_last_second_counts() -> None:
    loop = Loop()
    for _ in range(50):
        loop.step(10, 7)
    loop.now += 900_000_000
    for ms in (20.0, 40.0):
        loop.step(ms, 3)
    recent = loop.clock.recent()
    # 960 ms have passed since the fifty: those that ended in the last 40 ms before are still in.
    assert recent.steps == 2 + 4
    assert recent.tokens == 2 * 3 + 4 * 7
    assert recent.mean_ms == pytest.approx((20 + 40 + 4 * 10) / 6)
    assert recent.p99_ms == 40
    assert loop.clock.busy_ns == 560_000_000
    loop.now += 2_000_000_000
    assert loop.clock.recent().steps == 0
    assert loop.clock.recent().tokens == 0


def test_an_idle_turn_is_no_step() -> None:
    loop = Loop()
    loop.step(5, 0, did=False)
    assert loop.clock.recent().steps == 0
    assert loop.clock.busy_ns == 0


def test_it_remembers_a_second_and_no_more() -> None:
    loop = Loop()
    for _ in range(5000):
        loop.step(1, 1)
    assert loop.clock.remembered == 1001
    assert loop.clock.recent().steps == 1000
    assert loop.clock.recent().tokens == 1000
    loop.now += 2_000_000_000
    loop.step(1, 1)
    assert loop.clock.remembered == 2
    assert loop.clock.recent().tokens == 1
