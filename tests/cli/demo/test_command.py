"""`baton demo` over fake children: what a user sees."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
HARNESS = str(Path(__file__).parents[1] / "with_fakes.py")


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"FAKE_LOG": str(folder / "log"), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}


def test_without_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, HARNESS, "demo", "{}", "{}"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "1. The relay team lined up on the wet track, and" in done.stdout
    assert "dna ,kcart tew eht no pu denil maet yaler ehT" in done.stdout
    assert "KV cache shipped: 4 blocks of 8.0 KiB = 32.0 KiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, HARNESS, "demo", "{}", "{}"]
    process = subprocess.Popen(
        command,
        stdout=theirs,
        stderr=theirs,
        env=environment(tmp_path) | {"TERM": "xterm-256color", "LINES": "50"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the terminal's last user is gone
            break
    os.close(ours)
    assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "TTFT" in text
    assert "Who takes the baton next?" in text
    assert "\x1b[" in shown.decode()


# As of `baton up`: tests/cli/up/test_command.py.
@pytest.mark.slow
def test_a_failed_start_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, HARNESS, "demo", json.dumps({"worker": ["refuse"]}), "{}"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
