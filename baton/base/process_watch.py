"""Tells a process that hangs from one that is starved: by the processor time that it used while it made no
progress, and by the states of its threads (proc(5)).

    watch = ProcessWatch(pid)
    watch.progressed()          with each sign of progress
    watch.look()                several times a second
    if watch.hangs(limit_s): ...

On a loaded machine, or under a cgroup's quota, a healthy process may not run for seconds. It is then
runnable, or waits for memory that is read from disk, and uses no processor time. A process that sleeps or is
stopped waits for nothing that the scheduler could give it; one that sleeps may yet return by itself, and the
watcher says whether it is given the time for that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from baton.base.process_stat import process_stat, state_of

# A silent process is hung once it could have run for this many seconds in its silence,
RAN_S = 1.0
# or has been silent for this many seconds in any case.
STARVED_S = 20.0
# The most that the time between two looks counts: a watcher that did not run itself has not watched.
_LONGEST_LOOK_S = 0.5
# States of threads that run, wait for a processor, or wait for a disk; and of those that a signal or a tracer
# has stopped.
_WANTING, _STOPPED = frozenset("RD"), frozenset("Tt")


class Activity(NamedTuple):
    """A process at one moment: the processor time that it has used, in seconds; whether a thread of it waits
    for a processor or a disk, or runs; whether all its threads are stopped."""

    cpu_s: float
    wanting: bool
    stopped: bool = False


def activity(pid: int) -> Activity | None:
    """The activity of a process; None where there is none of that id here."""
    stat = process_stat(pid)
    if stat is None or stat.ended:
        return None
    states = _states(pid)
    return Activity(stat.cpu_s, bool(states & _WANTING), bool(states) and states <= _STOPPED)


def hangs(silent_s: float, ran_s: float, limit_s: float) -> bool:
    """True if a process hangs that has been silent for `silent_s` seconds and could have run for `ran_s` of
    them. `limit_s`: the silence that is normal."""
    return silent_s > limit_s and (ran_s >= min(RAN_S, limit_s) or silent_s > STARVED_S)


class ProcessWatch:
    """Watches one process for progress. Not thread-safe.

    A process that cannot be seen from here, since it is in another PID namespace, is judged by its silence
    alone.
    """

    def __init__(
        self,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
        look_at: Callable[[int], Activity | None] = activity,
        *,
        sleep_counts: bool = True,
    ) -> None:
        """`clock`: monotonic seconds. `sleep_counts`: whether time in which the process sleeps counts as time
        in which it could have run."""
        self._pid = pid
        self._sleep_counts = sleep_counts
        self._clock = clock
        self._look_at = look_at
        self._looked_at = clock()
        # Processor time at the last look; None before the first one since the last progress.
        self._cpu_s: float | None = None
        self.silent_s = 0.0
        """Seconds without progress, as far as this process could watch."""
        self.ran_s = 0.0
        """Seconds of these in which the watched process ran, or waited for nothing but itself."""

    def progressed(self) -> None:
        """Records progress, which sets the silent time to 0."""
        self._looked_at = self._clock()
        self._cpu_s = None
        self.silent_s = self.ran_s = 0.0

    def look(self) -> None:
        """Adds the time since the last look, or since the last progress."""
        now = self._clock()
        since, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        self.silent_s += since
        seen = self._look_at(self._pid)
        if seen is None or seen.stopped or (self._sleep_counts and not seen.wanting):
            self.ran_s += since
        elif self._cpu_s is not None:
            self.ran_s += min(since, seen.cpu_s - self._cpu_s)
        self._cpu_s = None if seen is None else seen.cpu_s

    def hangs(self, limit_s: float) -> bool:
        """True if the process hangs: it has been silent for longer than `limit_s`, though it could run."""
        return hangs(self.silent_s, self.ran_s, limit_s)


@cache
def process_space() -> str:
    """Names the host and the PID namespace of this process, within which a process id means the same; empty
    where they cannot be told."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{host}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _states(pid: int) -> set[str]:
    """The states of a process's threads."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return set()
    return {state_of(task / "stat") for task in tasks}
