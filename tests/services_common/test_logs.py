"""Logs: on stderr, from the level asked for."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
from services.common.logs import configure_logs, get_log
log = get_log("part")
configure_logs("warning", process="p")
log.info("unseen")
log.warning("seen", request="ab")
"""


def test_only_stderr_and_only_from_the_level() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "unseen" not in done.stderr
    (line,) = done.stderr.splitlines()
    for piece in ("event='seen'", "request='ab'", "process='p'", "part='part'", "level='warning'"):
        assert piece in line
