"""Step times of the last second, on a manual clock."""

from __future__ import annotations

import pytest

from services.worker.engine.common.step_clock import StepClock


class Loop:
    """A loop whose steps take a given time, and its clock."""

    def __init__(self) -> None:
        self.now = 0
        self.tokens = 0
        self.steps = 0
        self.clock = StepClock(lambda: self.tokens, lambda: self.steps, lambda: self.now)

    def step(self, ms: float, tokens: int, did: bool = True) -> None:
        def run() -> bool:
            self.now += round(ms * 1e6)
            self.tokens += tokens
            self.steps += did
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


def test_a_turn_without_work_does_not_count() -> None:
    loop = Loop()
    loop.step(5, 0, did=False)
    assert loop.clock.recent().steps == 0
    assert loop.clock.busy_ns == 0


def test_only_the_steps_of_a_second_are_stored() -> None:
    loop = Loop()
    for _ in range(5000):
        loop.step(1, 1)
    assert len(loop.clock._ended) == 1001
    assert loop.clock.recent().steps == 1000
    assert loop.clock.recent().tokens == 1000
    loop.now += 2_000_000_000
    loop.step(1, 1)
    assert len(loop.clock._ended) == 2
    assert loop.clock.recent().tokens == 1


class Queue:
    """A GPU's loop: a step is enqueued behind those under way, two at most, and each takes its time."""

    def __init__(self, step_ms: float) -> None:
        self.now = self.ended = self.tokens = 0
        self.step_ns = round(step_ms * 1e6)
        self.under_way: list[int] = []  # when each will have ended
        self.clock = StepClock(lambda: self.tokens, lambda: self.ended, lambda: self.now)

    def turn(self, ms: float, wanted: bool = True) -> None:
        """What has ended by now is seen; one more is enqueued where one may be; then time passes."""

        def step() -> bool:
            while self.under_way and self.under_way[0] <= self.now:
                self.under_way.pop(0)
                self.ended += 1
                self.tokens += 64
            if not wanted or len(self.under_way) == 2:
                return False
            self.now += 20_000  # what enqueuing takes the host
            self.under_way.append(max(self.now, *self.under_way[-1:], 0) + self.step_ns)
            return True

        self.clock.timed(step)
        self.now += round(ms * 1e6)


def test_an_enqueued_step_is_timed_until_it_ends() -> None:
    loop = Queue(9.0)
    for _ in range(1000):
        loop.turn(1.0)
    recent = loop.clock.recent()
    assert recent.mean_ms == pytest.approx(9.0, rel=0.01)
    assert recent.p99_ms <= 9.0 + 1.1, "it is looked at once a millisecond"
    assert recent.steps == pytest.approx(111, abs=1)
    assert recent.tokens == 64 * recent.steps
    assert loop.clock.busy_ns == pytest.approx(1000e6, rel=0.02)


def test_a_step_that_was_enqueued_as_part_of_another_counts() -> None:
    """Two that take 5 and 9 ms in turn; the longer ones are not enqueued by `timed`."""
    now = ended = 0
    clock = StepClock(lambda: 10 * ended, lambda: ended, lambda: now)
    for _ in range(100):
        assert clock.timed(lambda: True)
        clock.enqueued()
        for took in (5, 9):
            now += took * 1_000_000
            ended += 1
            assert not clock.timed(lambda: False)
    recent = clock.recent()
    assert (recent.steps, recent.tokens) == (143, 1430)
    assert recent.mean_ms == pytest.approx(7, rel=0.02)
    assert clock.busy_ns == 1_400_000_000


def test_steps_that_end_between_two_polls_share_the_time() -> None:
    loop = Queue(0.7)
    for _ in range(600):
        loop.turn(0.0)
        loop.turn(2.0)
    recent = loop.clock.recent()
    assert recent.mean_ms == pytest.approx(1.02, abs=0.01), "two of 0.7 ms in 2.04 ms: the poll comes late"
    assert recent.steps == pytest.approx(980, abs=20)


def test_time_without_enqueued_steps_is_not_busy_time() -> None:
    loop = Queue(5.0)
    for _ in range(20):
        loop.turn(0.5, wanted=False)
        loop.turn(0.5)
        for _ in range(40):
            loop.turn(1.0, wanted=False)
    assert loop.clock.recent().mean_ms == pytest.approx(5.5, abs=0.6)
    assert loop.clock.busy_ns == pytest.approx(20 * 5.5e6, rel=0.1)
    assert loop.clock.recent().p99_ms < 6.5


def test_steps_enqueued_before_the_clock_do_not_count() -> None:
    counts = iter((7, 7, 8, 8))
    now = iter(range(0, 100_000_000, 1_000_000))
    clock = StepClock(lambda: 0, lambda: next(counts), lambda: next(now))
    assert clock.timed(lambda: True)
    assert clock.busy_ns == 0, "captured before: nothing has ended since"
    assert not clock.timed(lambda: False)
    assert clock.recent().steps == 1


def test_time_on_the_device_counts_where_it_is_measured() -> None:
    """Of steps that wait behind another loop's."""
    now, ended, seconds = 0, 0, 0.0
    clock = StepClock(lambda: 10 * ended, lambda: ended, lambda: now, lambda: seconds)
    for _ in range(4):
        assert clock.timed(lambda: True)
        now += 30_000_000
        ended, seconds = ended + 1, seconds + 0.02
        assert not clock.timed(lambda: False)
    assert clock.busy_ns == 80_000_000
    recent = clock.recent()
    assert (recent.steps, recent.tokens, recent.mean_ms) == (4, 40, 20.0)
