"""Processors of the measuring machine, and their usage by processes, others and the host."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from baton.base.process_stat import process_stat

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Fields of /proc/stat's first line that are not computing time.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


class Usage:
    """Processor time of the given processes and of the machine since construction."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        """`processes`: name → pid. Raises FileNotFoundError where one has ended."""
        self._pids = dict(processes)
        self._begun = time.monotonic(), _machine(), self._seconds()

    def shares(self) -> dict[str, float]:
        """Usage since construction, in processors: by name, then `others` and `stolen` (by the host)."""
        began, machine, before = self._begun
        wall = time.monotonic() - began
        now = self._seconds()
        ours = {name: (now[name] - before[name]) / wall for name in now}
        busy, stolen = ((b - a) / wall for a, b in zip(machine, _machine(), strict=True))
        return {**ours, "others": max(0.0, busy - sum(ours.values())), "stolen": stolen}

    def _seconds(self) -> dict[str, float]:
        return {name: process_cpu_s(pid) for name, pid in self._pids.items()}


def spread_out(count: int) -> list[int]:
    """`count` usable processors on as many cores as possible: second threads of cores come last. Raises
    ValueError where there are fewer.
    """
    usable = sorted(os.sched_getaffinity(0))
    rank: dict[int, int] = {}
    taken: dict[str, int] = {}
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = path.read_text() if path.exists() else str(cpu)
        rank[cpu] = taken[core] = taken.get(core, -1) + 1
    if count > len(usable):
        raise ValueError(f"{count} processors are wanted and {len(usable)} are here")
    return sorted(usable, key=lambda cpu: (rank[cpu], cpu))[:count]


def process_cpu_s(pid: int) -> float:
    """Processor time that a process has used, in seconds. Raises FileNotFoundError where it has ended."""
    stat = process_stat(pid)
    if stat is None:
        raise FileNotFoundError(f"process {pid} has ended")
    return stat.cpu_s


def _machine() -> tuple[float, float]:
    """Seconds that all processors were busy, and that the host withheld."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]) * _TICK_S, ticks[_STEAL] * _TICK_S
