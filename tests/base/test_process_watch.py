"""A process that hangs is told from one that is starved: in virtual time, and real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from baton.base.process_watch import RAN_S, STARVED_S, Activity, ProcessWatch, activity
from tests.support.waiting import block_until

LIMITS = (0.5, 2.0, 5.0, 60.0)


class Watched:
    """A watch in virtual time, of a process that is given `share` of a processor while it wants one."""

    def __init__(
        self, share: float, *, wanting: bool = True, stopped: bool = False, sleep_counts: bool = True
    ) -> None:
        self.now, self.cpu_s, self.share = 100.0, 7.0, share
        self.watch = ProcessWatch(
            1, lambda: self.now, lambda _: Activity(self.cpu_s, wanting, stopped), sleep_counts=sleep_counts
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cpu_s += self.share * seconds

    def seconds_until_hung(self, limit_s: float, look_s: float = 0.1) -> float:
        self.watch.progressed()
        began = self.now
        while not self.watch.hangs(limit_s):
            assert self.now - began < 100
            self.pass_time(look_s)
            self.watch.look()
        return self.now - began


@pytest.mark.parametrize("limit_s", LIMITS)
def test_a_process_that_sleeps_or_computes_hangs_at_the_limit(limit_s: float) -> None:
    for watched in (Watched(0.0, wanting=False), Watched(1.0)):
        assert limit_s < watched.seconds_until_hung(limit_s) < limit_s + 0.75


@pytest.mark.parametrize("limit_s", LIMITS)
def test_a_process_that_is_given_nothing_hangs_after_the_longest_time(limit_s: float) -> None:
    longest = max(STARVED_S, limit_s)
    assert longest < Watched(0.0).seconds_until_hung(limit_s) < longest + 0.75


@pytest.mark.parametrize("limit_s", LIMITS)
def test_a_watcher_may_give_a_process_that_sleeps_the_longest_time(limit_s: float) -> None:
    """One that is stopped, or computes, hangs at the limit all the same."""
    longest = max(STARVED_S, limit_s)
    sleeps = Watched(0.0, wanting=False, sleep_counts=False)
    assert longest < sleeps.seconds_until_hung(limit_s) < longest + 0.75
    stopped = Watched(0.0, wanting=False, stopped=True, sleep_counts=False)
    for watched in (stopped, Watched(1.0, sleep_counts=False)):
        assert limit_s < watched.seconds_until_hung(limit_s) < limit_s + 0.75


def test_a_share_of_a_processor_counts_as_far_as_it_goes() -> None:
    draw = random.Random(3)
    for _ in range(200):
        share, limit_s = draw.uniform(0.01, 1), draw.choice(LIMITS)
        ran_s = min(RAN_S, limit_s)
        most = max(limit_s, min(STARVED_S, ran_s / share))
        assert most < Watched(share).seconds_until_hung(limit_s, look_s=0.05) < most + 0.05 / share + 0.2


def test_a_watcher_that_did_not_run_has_not_watched() -> None:
    watched = Watched(0.0, wanting=False)
    for _ in range(3):
        watched.pass_time(60.0)
        watched.watch.look()
    assert watched.watch.silent_s == 1.5
    assert not watched.watch.hangs(2.0)


def test_progress_starts_the_watch_anew() -> None:
    watched = Watched(1.0)
    for _ in range(50):
        watched.watch.progressed()
        for _ in range(19):
            watched.pass_time(0.1)
            watched.watch.look()
        assert not watched.watch.hangs(2.0)


SPINS = "print(flush=True)\nwhile True: pass"
SLEEPS = "import time; print(flush=True); time.sleep(100)"


@contextlib.contextmanager
def _running(code: str, *, idle: bool = False) -> Iterator[int]:
    """A process on one processor; `idle`: it runs there only while no other process wants to."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()  # its interpreter has started
        os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})
        if idle:
            os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
        time.sleep(0.1)
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def _sleeps(pid: int) -> bool:
    seen = activity(pid)
    return seen is not None and not seen.wanting


def _is_stopped(pid: int) -> bool:
    seen = activity(pid)
    return seen is not None and seen.stopped


def _watch_for(pid: int, seconds: float, *, sleep_counts: bool = True) -> ProcessWatch:
    """Watches a process until it was seen silent for a time, which is later where the watcher starves."""
    watch = ProcessWatch(pid, sleep_counts=sleep_counts)
    while watch.silent_s < seconds:
        time.sleep(0.05)
        watch.look()
    return watch


def test_real_processes() -> None:
    with _running(SLEEPS) as pid:
        block_until(lambda: _sleeps(pid))
        watch = _watch_for(pid, 0.5)
        assert watch.ran_s == watch.silent_s > 0.4
        assert _watch_for(pid, 0.5, sleep_counts=False).ran_s < 0.1
    with _running(SPINS) as pid:
        os.kill(pid, signal.SIGSTOP)
        block_until(lambda: _is_stopped(pid))  # once it is given a core
        for sleep_counts in (True, False):
            watch = _watch_for(pid, 0.5, sleep_counts=sleep_counts)
            assert watch.ran_s == watch.silent_s > 0.4
    with _running(SPINS), _running(SPINS, idle=True) as pid:
        watch = _watch_for(pid, 0.6)
        assert watch.silent_s > 0.5
        assert watch.ran_s < watch.silent_s / 2
    assert activity(pid) is None
