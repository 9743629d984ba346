"""A device that makes no progress is noticed, and one that is slow or was not watched is not accused."""

from __future__ import annotations

import random

import pytest

from baton.engine.device_watchdog import DeviceWatchdog


class Watched:
    """A watchdog in virtual time, looking at a queue once every `turn` seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watchdog = DeviceWatchdog(lambda: self.now)

    def seconds_until_hung(self, expected_step_s: float, *, turn: float = 0.001, most: float = 60.0) -> float:
        began = self.now
        while self.now - began < most:
            if self.watchdog.look(pending=True, progress=1, expected_step_s=expected_step_s):
                return self.now - began
            self.now += turn
        raise AssertionError("never found hung")


@pytest.mark.parametrize(
    ("expected_step_s", "limit"), [(0.0, 2.0), (0.005, 2.0), (0.2, 2.0), (0.3, 3.0), (2, 20)]
)
@pytest.mark.parametrize("turn", [0.0002, 0.05])
def test_no_progress_for_two_seconds_or_ten_steps_is_a_hang(
    expected_step_s: float, limit: float, turn: float
) -> None:
    after = Watched().seconds_until_hung(expected_step_s, turn=turn)
    assert limit < after <= limit + 2 * turn + 1e-6


def test_a_device_that_makes_progress_or_has_no_work_is_never_hung() -> None:
    watched = Watched()
    for step in range(40):  # each takes 1.9 s
        for _ in range(19):
            assert not watched.watchdog.look(pending=True, progress=step, expected_step_s=0.005)
            watched.now += 0.1
    for _ in range(1000):
        assert not watched.watchdog.look(pending=False, progress=40, expected_step_s=0.005)
        watched.now += 0.1
    # The first look at new work starts the watch, though the count of steps has long been the same.
    assert watched.seconds_until_hung(0.0, turn=0.01) > 2.0


def test_no_false_alarm_for_stalls_below_a_second_in_a_thousand_tries() -> None:
    draw = random.Random(5)
    watched = Watched()
    for progress in range(1000):
        until = watched.now + draw.uniform(0, 0.999)
        while watched.now < until:
            assert not watched.watchdog.look(pending=True, progress=progress, expected_step_s=0.005)
            watched.now += draw.uniform(0.0001, 0.05)


def test_a_process_that_was_stopped_does_not_blame_the_device() -> None:
    watched = Watched()
    for _ in range(3):
        assert not watched.watchdog.look(pending=True, progress=1, expected_step_s=0.005)
        watched.now += 60.0  # SIGSTOP, SIGCONT
    assert not watched.watchdog.look(pending=True, progress=1, expected_step_s=0.005)
    assert watched.seconds_until_hung(0.005) < 2.0, "the time it did watch counts"


def test_devices_that_wait_for_each_other_have_the_deadline_more() -> None:
    watched = Watched()
    watched.watchdog = DeviceWatchdog(lambda: watched.now, deadline_s=3.0)
    assert 5.0 < watched.seconds_until_hung(0.005) < 5.01


def test_a_wait_that_ended_in_vain_is_raised_whether_or_not_there_is_work() -> None:
    ended: list[str] = []

    def check() -> None:
        for what in ended:
            raise RuntimeError(what)

    watchdog = DeviceWatchdog(lambda: 0.0, deadline_s=3.0, check=check)
    assert not watchdog.look(pending=False, progress=1, expected_step_s=0.005)
    ended.append("a wait")
    with pytest.raises(RuntimeError, match="a wait"):
        watchdog.look(pending=False, progress=1, expected_step_s=0.005)
