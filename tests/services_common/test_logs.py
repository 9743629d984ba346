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


SPEAKS_TO_NOBODY = """
import sys
from services.common.logs import configure_logs, get_log

configure_logs("info", process="test")
sys.stdin.read()
for number in range(3):
    get_log("here").info("a line", number=number)
print("lives", flush=True)
"""


def test_a_reader_that_left_stops_nothing() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SPEAKS_TO_NOBODY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    child.stderr.close()
    child.stderr = None
    out, _ = child.communicate("go", timeout=30)
    assert out == "lives\n"
