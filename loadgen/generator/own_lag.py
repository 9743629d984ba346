"""Measures how late one process of the generator runs, and why, since its figures may be wrong by as much.

LoopLag   how late the event loop runs. A tick is due every 5 ms. A loop that is busy during several ticks
          makes one late call, but each missed tick is counted with its own lag, so that a long stall weighs
          more than a short one.
CpuWait   how long runnable threads wait for a CPU, as the kernel counts it. The lag of the loop is not
          enough: with gRPC another thread receives a message first, and its wait is invisible to the loop.
CpuLimit  how long the CPU limit of the control group throttled this process, as the kernel counts it. A
          container with a limit runs until its quota of a period (usually 100 ms) is used up and then stops
          for the rest of the period, which other measurements do not show. Groups above this one may have
          limits too, so all visible ones are read. Control groups of version 2 or 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

TICK_S = 0.005
# asyncio rounds a wait up to the next millisecond, which is no lag.
_TIMER_S = 0.001
EVERY_S = 0.1
_PROC = Path("/proc/self")
# What cpu.stat calls the time: in version 2 and in version 1, and how many of it are a second.
_UNITS = {"throttled_usec": 1e6, "throttled_time": 1e9}


class LoopLag:
    """Samples the lag of an event loop while `run` runs in it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.samples: list[float] = []

    async def run(self) -> None:
        """Samples the event loop's lag until cancelled."""
        due = self._clock() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - self._clock()))
            now = self._clock()
            while due <= now:
                self.samples.append(max(0.0, now - due - _TIMER_S))
                due += TICK_S


class CpuWait:
    """Samples while `run` runs: the mean wait in seconds of each tenth of a second. No samples where the
    kernel does not count. Another thread reads a file of each thread: on the event loop it made tokens that
    came meanwhile seem 3 to 5 ms late.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.samples: list[float] = []

    async def run(self) -> None:
        """Samples the waits for a processor until cancelled."""
        waited, times = await asyncio.to_thread(_waits)
        while True:
            await asyncio.sleep(EVERY_S)
            waited_now, times_now = await asyncio.to_thread(_waits)
            if times_now > times and waited_now >= waited:
                self.samples.append((waited_now - waited) / (times_now - times) / 1e9)
            waited, times = waited_now, times_now


def _waits() -> tuple[int, int]:
    """Nanoseconds that all threads have waited, and how often one was scheduled."""
    waited = times = 0
    for task in _PROC.glob("task/*/schedstat"):
        try:
            _, delay, slices = task.read_bytes().split()
        except (OSError, ValueError):
            continue  # the thread has ended
        waited += int(delay)
        times += int(slices)
    return waited, times


class CpuLimit:
    """Samples while `run` runs: the seconds of each tenth of a second in which the group was throttled. No
    samples where the kernel does not count.
    """

    def __init__(self, clock: Callable[[], float], proc: Path = _PROC) -> None:
        self._clock = clock
        self._stats = list(_stats(proc))
        self.samples: list[float] = []

    def held_back(self) -> tuple[int, float]:
        """Number and seconds of throttlings since the groups were created."""
        times, seconds = 0, 0.0
        for stat in self._stats:
            counts = _read(stat)
            times += counts.get("nr_throttled", 0)
            seconds += sum(counts.get(name, 0) / unit for name, unit in _UNITS.items())
        return times, seconds

    async def run(self) -> None:
        """Samples the time held back by the CPU limit until cancelled."""
        if not self._stats:
            return
        (_, before), began = self.held_back(), self._clock()
        while True:
            await asyncio.sleep(EVERY_S)
            (_, now), ended = self.held_back(), self._clock()
            self.samples.append(max(0.0, min(now - before, ended - began)))
            before, began = now, ended


def _stats(proc: Path) -> Iterator[Path]:
    """The cpu.stat files of this process's control group and its ancestors, as far as they are mounted."""
    for root, mounted, version in _mounts(proc):
        group = _group(proc, version)
        if group is None:
            continue
        below = group.relative_to(root) if group.is_relative_to(root) else Path()
        for place in (below, *below.parents):
            if "nr_throttled" in _read(mounted / place / "cpu.stat"):
                yield mounted / place / "cpu.stat"


def _mounts(proc: Path) -> Iterator[tuple[Path, Path, int]]:
    """Yields for each hierarchy with CPU limits the group's path, the mount point, the version."""
    for line in _lines(proc / "mountinfo"):
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        _, _, _, root, mounted, *_ = mount.split(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            yield Path(root), Path(mounted), 2 if kind == "cgroup2" else 1


def _group(proc: Path, version: int) -> Path | None:
    for line in _lines(proc / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if (number == "0") if version == 2 else ("cpu" in controllers.split(",")):
            return Path(path)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # not Linux


def _read(stat: Path) -> dict[str, int]:
    """The contents, or empty where there is no such file."""
    counts = (line.split(" ") for line in _lines(stat))
    return {name: int(count) for name, count in counts}
