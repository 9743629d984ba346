"""The reaper: every process that a command has started, in any session, ends with the reaper's owner, and all
end with one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.base.process_stat import is_running
from services.common.processes.process_tree import descendants

# Starts a child in a session of its own, which starts an orphan in another, and both ignore SIGTERM.
WILD = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, __file__, str(depth - 1), *sys.argv[2:]], start_new_session=True)
if depth == 1:
    os._exit(0)
open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
while depth == 2 and len(open(sys.argv[2]).readlines()) < 2:
    time.sleep(0.01)
time.sleep(float(sys.argv[3]) if depth == 2 else 600)
sys.exit(int(sys.argv[4]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wild.py").write_text(WILD)
    (tmp_path / "theirs").mkdir()
    return tmp_path


def reaper(folder: Path, life_s: float, code: int = 0) -> subprocess.Popen[bytes]:
    wild = [sys.executable, str(folder / "wild.py"), "2", str(folder / "pids"), str(life_s), str(code)]
    command = [sys.executable, "-m", "services.cluster.on_ray.ray_reaper", str(folder / "theirs"), *wild]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def started(folder: Path) -> list[int]:
    """The pids of the command and of the daemon that it leaves, once both run."""
    for _ in range(1000):
        if (folder / "pids").exists() and len(pids := (folder / "pids").read_text().split()) == 2:
            return sorted((int(pid) for pid in pids), key=depth, reverse=True)
        time.sleep(0.01)
    raise AssertionError("they did not start")


def depth(pid: int) -> int:
    return int(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2])


@pytest.fixture
def orphan(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    process = reaper(folder, life_s=600)
    pids = started(folder)
    yield process, pids
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_its_owner_is_done(folder: Path, orphan: tuple[subprocess.Popen[bytes], list[int]]) -> None:
    process, pids = orphan
    assert set(pids) <= set(descendants(process.pid)), "the orphan is not below it"
    process.terminate()  # is no reason to leave
    time.sleep(0.2)
    assert all(is_running(pid) for pid in pids)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    assert not any(is_running(pid) for pid in pids)
    assert not (folder / "theirs").exists()


def test_its_command_fails(folder: Path) -> None:
    with reaper(folder, life_s=1.0, code=7) as process:
        pids = started(folder)
        assert process.wait(10) == 1
        assert not any(is_running(pid) for pid in pids)
        assert not (folder / "theirs").exists()


def test_a_daemon_ends_that_the_command_has_left(folder: Path) -> None:
    with reaper(folder, life_s=1.0) as process:
        command, daemon = started(folder)
        while is_running(command):
            time.sleep(0.01)
        time.sleep(0.2)
        assert is_running(daemon)
        assert process.poll() is None
        os.kill(daemon, signal.SIGKILL)
        assert process.wait(10) == 1
        assert not (folder / "theirs").exists()


def test_its_owner_is_done_with_daemons(folder: Path) -> None:
    with reaper(folder, life_s=0.5) as process:
        command, daemon = started(folder)
        while is_running(command):
            time.sleep(0.01)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
        assert not is_running(daemon)


def test_its_command_leaves_no_daemon(folder: Path) -> None:
    command = [sys.executable, "-m", "services.cluster.on_ray.ray_reaper", str(folder / "theirs"), "true"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(10) == 1
