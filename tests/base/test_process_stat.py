"""The state of a process: itself, a running child, a zombie and none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from baton.base.process_stat import is_running, process_stat

# A command name in which the fields seem to begin anew.
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"a) Z 1 (b", 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_itself() -> None:
    stat = process_stat(os.getpid())
    assert stat is not None
    assert (stat.state, stat.parent, stat.ended) == ("R", os.getppid(), False)
    assert abs(stat.cpu_s - time.process_time()) < 0.5
    assert 0 < stat.started <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")


def test_a_child_whose_name_reads_like_fields_until_it_is_reaped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    stat = process_stat(child.pid)
    assert stat is not None
    assert (stat.parent, stat.ended) == (os.getpid(), False)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stat = process_stat(child.pid)
    assert stat is not None
    assert stat.ended
    assert not is_running(child.pid)
    child.wait()
    assert process_stat(child.pid) is None
    assert not is_running(child.pid)
    child.stdin.close()
    child.stdout.close()
