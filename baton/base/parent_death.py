"""A child that must not outlive its parent.

Run as a program, this file has the kernel end it with its parent, and then executes another program in its
place; `tied` has the command. It replaces `preexec_fn`, with which `subprocess` forks instead of vforks: then
gRPC's handlers run in the copy, start its threads there, and now and then crash or hang it before it is the
new program (grpc/grpc#43055).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 126


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")


def tied(command: Sequence[str]) -> list[str]:
    """The command that runs `command`, in the same process, killed when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Becomes `command`, unless `parent` has died meanwhile."""
    die_with_parent()
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(_EXIT_ORPHANED)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
