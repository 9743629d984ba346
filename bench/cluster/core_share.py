"""Limits processes to a part of a core each, by control groups, to simulate many small machines.

Shows how something scales with processes where there are fewer cores. Needs the cpu controller of control
groups, version 1 or 2, and the right to create groups (usually root).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from services.common.processes.process_tree import descendants

_ROOT = Path("/sys/fs/cgroup")
# The shortest quota, so that a throttled process continues soon.
_QUOTA_US = 1000
_LOOK_S = 0.005


@contextlib.contextmanager
def core_share(share: float, module: str) -> Iterator[None]:
    """Holds every descendant that runs `python -m module` to `share` of a core during the block. Raises
    OSError where that is not possible.
    """
    over = threading.Event()
    groups: dict[int, Path] = {}
    watching = threading.Thread(target=_watch, args=(share, module, groups, over), daemon=True)
    _remove(_make(share, 0))  # checks that it is possible
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        for group in groups.values():
            _remove(group)


def _watch(share: float, module: str, groups: dict[int, Path], over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        for pid in descendants(os.getpid()):
            if pid not in groups and _runs(pid, module):
                groups[pid] = _make(share, pid)
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    (groups[pid] / "cgroup.procs").write_text(str(pid))


def _make(share: float, pid: int) -> Path:
    first = (_ROOT / "cpu").is_dir()
    group = (_ROOT / "cpu" if first else _ROOT) / f"baton-bench-{os.getpid()}-{pid}"
    group.mkdir()
    period = str(round(_QUOTA_US / share))
    if first:
        (group / "cpu.cfs_period_us").write_text(period)
        (group / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
    else:
        (group / "cpu.max").write_text(f"{_QUOTA_US} {period}")
    return group


def _remove(group: Path) -> None:
    with contextlib.suppress(OSError):  # one of its processes is still ending
        group.rmdir()


def _runs(pid: int, module: str) -> bool:
    with contextlib.suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
