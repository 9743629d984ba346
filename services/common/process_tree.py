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


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs; those that wait to be reaped too."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


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


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
