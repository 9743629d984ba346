"""Runs a command and ends all its descendants: `python -m services.cluster.ray_reaper FOLDER COMMAND…`

This process adopts every orphan that the command leaves, in any session (it is a child subreaper). When its
stdin is closed, which the kernel does if the owner dies, or when the command ends, all descendants are
killed and FOLDER is removed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys

from services.common.processes.process_tree import Orphans, adopt_orphans, kill_descendants

_KILL_S = 5.0
_REAP_S = 5.0
_READ_BYTES = 4096


def main() -> int:
    """Exit code: 0 when the owner closed stdin, 1 when the command ended by itself or a process could
    not be killed."""
    folder, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the owner ends this process
    adopt_orphans()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        owner_done = _wait(os.pidfd_open(process.pid))
    finally:
        left = kill_descendants(_KILL_S)
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if owner_done and not left else 1


def _wait(command: int) -> bool:
    """Waits until the owner closes stdin (returns True) or the command ends (False)."""
    stdin, orphans = sys.stdin.fileno(), Orphans()
    while True:
        readable, _, _ = select.select([stdin, command], [], [], _REAP_S)
        orphans.reap()
        if stdin in readable and not os.read(stdin, _READ_BYTES):
            return True
        if command in readable:
            return False


if __name__ == "__main__":
    sys.exit(main())
