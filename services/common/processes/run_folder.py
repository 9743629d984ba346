"""Files by which the processes of one Ray node know its running workers, and that the node is stopping.

    /tmp/baton/            BATON_RUN_DIR names another folder; mode 0700
      stopping             made by `baton ray stop-workers`; a worker's actor that finds it starts no worker
      workers/NAME.pid     process id and start time of a running worker's front

`ray start` ends its processes at SIGTERM without a drain, so `baton ray stop-workers` runs before it does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.base.process_stat import process_stat

FOLDER_VARIABLE = "BATON_RUN_DIR"
_DEFAULT = Path("/tmp/baton")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one Ray node. Methods raise OSError where it cannot be read or written."""

    path: Path

    @classmethod
    def of_node(cls, environment: Mapping[str, str]) -> RunFolder:
        """The folder of the node that this process runs on."""
        return cls(Path(environment.get(FOLDER_VARIABLE) or _DEFAULT))

    def record(self, name: str, pid: int) -> None:
        """Lists a worker's process. Call `stopping` afterwards: one of the two sees the other."""
        self._workers.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = start_time(pid)
        if started is not None:
            partial = self._workers / f"{name}.partial"
            partial.write_text(f"{pid} {started}\n")
            partial.replace(self._workers / f"{name}.pid")

    def remove(self, name: str) -> None:
        """Takes a worker that has ended off the list."""
        (self._workers / f"{name}.pid").unlink(missing_ok=True)

    def workers(self) -> dict[str, int]:
        """Process ids of the listed workers that still run, by name."""
        found = {}
        for file in sorted(self._workers.glob("*.pid")):
            with contextlib.suppress(FileNotFoundError, ValueError):
                pid, started = map(int, file.read_text().split())
                if start_time(pid) == started:  # else another process has its id now
                    found[file.stem] = pid
        return found

    def mark_stopping(self) -> None:
        """Keeps actors of this node from starting further workers."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._marker.write_text(f"{_now_ticks()}\n")

    def stopping(self, node_pid: int) -> bool:
        """True if the node whose first process is `node_pid` is stopping.

        A mark that is older than that process is of an earlier container, whose /tmp a pod keeps.
        """
        try:
            marked = int(self._marker.read_text())
        except (OSError, ValueError):
            return False
        node_started = start_time(node_pid)
        return node_started is None or marked >= node_started

    @property
    def _workers(self) -> Path:
        return self.path / "workers"

    @property
    def _marker(self) -> Path:
        return self.path / "stopping"


def start_time(pid: int) -> int | None:
    """Returns the start of a process, in clock ticks since boot; None if it has ended."""
    stat = process_stat(pid)
    return None if stat is None or stat.ended else stat.started


def _now_ticks() -> int:
    """The present, in clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
