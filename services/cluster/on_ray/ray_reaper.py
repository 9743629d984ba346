"""Runs a command that starts daemons, and ends them all:

    python -m services.cluster.on_ray.ray_reaper FOLDER COMMAND…

This process adopts every orphan that the command leaves, in any session (it is a child subreaper). When its
stdin is closed, which the kernel does if the owner dies, when the command fails, or when one of the daemons
that it has left ends, all descendants are killed and FOLDER is removed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from baton.base.process_stat import is_running
from services.common.processes.process_tree import Orphans, adopt_orphans, children, kill_descendants

_KILL_S = 5.0
_REAP_S = 5.0
_READ_BYTES = 4096


def main() -> int:
    """Exit code: 0 when the owner closed stdin, 1 when the command failed, a daemon ended by itself or a
    process could not be killed."""
    folder, *command = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the owner ends this process
    adopt_orphans()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        owner_done = _wait([os.pidfd_open(process.pid)])
        if not owner_done and process.wait() == 0:
            owner_done = _wait([os.pidfd_open(pid) for pid in children(os.getpid()) if is_running(pid)])
    finally:
        left = kill_descendants(_KILL_S)
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if owner_done and not left else 1


def _wait(processes: Sequence[int]) -> bool:
    """Waits until the owner closes stdin (returns True) or one of the processes, by pidfd, ends (False); at
    once where there is none."""
    stdin, orphans = sys.stdin.fileno(), Orphans()
    while processes:
        readable, _, _ = select.select([stdin, *processes], [], [], _REAP_S)
        if stdin in readable and not os.read(stdin, _READ_BYTES):
            return True
        if any(process in readable for process in processes):
            return False
        orphans.reap()
    return False


if __name__ == "__main__":
    sys.exit(main())
