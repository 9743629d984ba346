"""A child that must not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec as little as possible may run.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
