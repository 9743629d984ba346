"""The state, parent, processor time and start of a process, from `/proc/PID/stat` (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Indexes of fields behind the command, which may itself contain spaces and parentheses.
_STATE, _PARENT, _USER, _SYSTEM, _START = 0, 1, 11, 12, 19


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process's or a zombie's state (one letter, such as "R", "S", "T", "Z"), its parent's pid, its
    processor time in seconds and its start in clock ticks since boot."""

    state: str
    parent: int
    cpu_s: float
    started: int

    @property
    def ended(self) -> bool:
        """True for a zombie, which remains until its parent reaps it."""
        return self.state in "ZX"


def process_stat(pid: int) -> ProcessStat | None:
    """Reads the state of a process; None if there is none with that pid."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    if not fields:
        return None
    cpu_s = (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S
    return ProcessStat(fields[_STATE], int(fields[_PARENT]), cpu_s, int(fields[_START]))


def is_running(pid: int) -> bool:
    """True if the process exists and has not ended."""
    stat = process_stat(pid)
    return stat is not None and not stat.ended


def state_of(file: Path) -> str:
    """The state in a `stat` file, of a process or of a thread; "X" where it has ended."""
    fields = _fields(file)
    return fields[_STATE] if fields else "X"


def _fields(file: Path) -> list[str]:
    """The fields of a `stat` file behind the command; none where the process or thread has ended."""
    try:
        return file.read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
