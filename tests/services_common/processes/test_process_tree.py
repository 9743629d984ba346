"""Orphans that have ended are reaped; children of this process are left to their owners."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, subprocess, time
from services.common.processes.process_tree import Orphans, adopt_orphans, children

adopt_orphans()
shell = ["sh", "-c", "sleep 0.05 >&2 & echo $!"]  # it ends before what it started
orphan = int(subprocess.run(shell, stdout=subprocess.PIPE).stdout)
own = subprocess.Popen(["sh", "-c", "exit 3"])
living = subprocess.Popen(["sleep", "60"])
time.sleep(0.5)
orphans = Orphans()
here = {orphan, own.pid, living.pid}
assert set(children(os.getpid())) == here, "they have not ended, or this sees nothing"
orphans.reap()
assert set(children(os.getpid())) == here, "too soon: it may be another process's"
assert own.wait() == 3
orphans.reap()
assert children(os.getpid()) == [living.pid]
living.kill()
assert living.wait() == -9
"""


def test_orphans_are_reaped_and_own_children_are_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=20)
