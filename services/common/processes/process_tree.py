"""What a process leaves behind, and how to leave nothing: orphans come to us, and we kill all below us.

Standard library only: the warden of a local Ray starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.01


def adopt_orphans() -> None:
    """Has every orphan among this process's descendants become its child, and not init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


class Orphans:
    """Adopted orphans that have ended: nobody waits for them but us, and until then they stay in the process
    table. Call `reap` every few seconds."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self) -> None:
        """Reaps those that had ended when it was last called. A child of our own is not among them by then:
        whoever started it waits for it, and hears of its end at once."""
        ended = {pid for pid in children(os.getpid()) if _has_ended(pid)}
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def children(pid: int) -> list[int]:
    """Of all threads of a process; those that wait to be reaped too."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs; those that wait to be reaped too."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def kill_descendants(within_s: float) -> list[int]:
    """Kills and reaps all below this process, which must have adopted its orphans: then none escapes by
    a session of its own or by forking meanwhile. Those it could not end in time; normally none."""
    deadline = time.monotonic() + within_s
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        if time.monotonic() > deadline:
            return left
        time.sleep(_PAUSE_S)
    return []


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
