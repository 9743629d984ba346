"""Leaves no processes behind: adopts orphaned descendants, reaps them, and kills every descendant.

Standard library only, since the process that guards a local Ray must start in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from baton.base.process_stat import process_stat

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01


def adopt_orphans() -> None:
    """Makes this process the parent of orphans among its descendants, instead of init. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


class Orphans:
    """Reaps adopted orphans that have ended, which otherwise remain in the process table. To be called every
    few seconds."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self) -> None:
        """Reaps the processes that had ended by the previous call. By then a child that this process started
        has been reaped by its owner, who is notified at once."""
        ended = {pid for pid in children(os.getpid()) if (stat := process_stat(pid)) and stat.ended}
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def children(pid: int) -> list[int]:
    """Process ids of the children of a process, zombies included."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process, zombies included."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def kill_descendants(within_s: float) -> list[int]:
    """Kills and reaps all descendants of this process, which must have called `adopt_orphans`: then none
    escapes by starting a session or by forking. Returns the ids of processes that remain after `within_s`;
    normally none."""
    deadline = time.monotonic() + within_s
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)
    return []


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
