"""Command lines of processes, some of which may end meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def command_line(pid: int) -> list[str]:
    """Program and arguments of a process; empty where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


def command_lines(pids: Iterable[int]) -> dict[int, str]:
    """The command lines of the processes that have not ended, with their arguments separated by blanks."""
    found = {pid: " ".join(command_line(pid)) for pid in pids}
    return {pid: command for pid, command in found.items() if command}
