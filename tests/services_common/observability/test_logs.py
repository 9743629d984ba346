"""Logs: on stderr, from the level asked for."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
from services.common.observability.logs import configure_logs, get_log
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


LOGS_TO_A_CLOSED_PIPE = """
import sys
from services.common.observability.logs import configure_logs, get_log

configure_logs("info", process="test")
sys.stdin.read()
for number in range(3):
    get_log("here").info("a line", number=number)
print("lives", flush=True)
"""


def test_a_closed_stderr_does_not_fail_logging() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LOGS_TO_A_CLOSED_PIPE],
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


STANDARD_LIBRARY = """
import logging, threading
from services.common.observability.logs import configure_logs

configure_logs("info", process="engine", worker="decode-0")
ours = logging.getLogger("kvtransfer.sender.sender")
ours.debug("unseen")
threading.Thread(target=lambda: ours.warning("link_fallback", extra={"transport": "grpc"})).start()
ours.info("no %s here", "placeholder")
logging.getLogger("asyncio").info("unseen")
logging.getLogger("asyncio").log(35, "odd level")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("anything.at.all").exception("it failed")
"""


def test_the_standard_librarys_loggers_have_the_same_format_in_every_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STANDARD_LIBRARY], capture_output=True, text=True, check=True
    )
    lines = sorted(done.stderr.splitlines(), key=lambda line: line.partition("event=")[2])
    assert len(lines) == 4, done.stderr
    for line in lines:
        assert line.startswith("timestamp='")
        for piece in ("level='", "part='", "process='engine'", "worker='decode-0'"):
            assert piece in line
    failed, link, none, odd = lines
    assert "ZeroDivisionError" in failed
    assert "part='anything.at.all'" in failed
    for piece in ("event='link_fallback'", "transport='grpc'", "level='warning'"):
        assert piece in link
    assert "event='no placeholder here'" in none
    assert "level='warning'" in odd


TEXTS = """
import asyncio, logging, sys, threading
from services.common.observability.logs import configure_logs, get_log

configure_logs("info", exception_texts="texts" in sys.argv, process="router")

def fail():
    raise ValueError("the prompt: open sesame")

def wrapped():
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("open sesame", error) from error

async def main():
    loop = asyncio.get_running_loop()
    loop.call_soon(fail)
    task = loop.create_task(later())
    await asyncio.sleep(0.01)
    del task
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(later())
    except* ValueError as errors:
        get_log("here").error("group_failed", exc_info=errors)

async def later():
    fail()

asyncio.run(main())
for failing in (fail, wrapped):
    try:
        failing()
    except Exception as error:
        get_log("here").exception("first_failed")
        get_log("here").error("second_failed", exc_info=error)
        logging.getLogger("library").exception("third_failed %s", "x")
try:
    open("/nothing/open sesame")
except OSError:
    get_log("here").exception("fourth_failed")

thread = threading.Thread(target=fail)
thread.start()
thread.join()
type("Ends", (), {"__del__": lambda self: fail()})()
wrapped()
"""


def test_no_line_has_the_text_of_an_exception() -> None:
    """However it gets into the log: by a handler, a library, a callback of the event loop, a lost task."""
    command = [sys.executable, "-c", TEXTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "sesame" not in done.stderr
    for piece in (
        "Exception in callback",
        "Task exception was never retrieved",
        "group_failed",
        "thread_failed",
        "exception_ignored",
        "process_failed",
        "first_failed",
        "second_failed",
        "third_failed x",
        "builtins.ValueError",
        "This led to",
        "builtins.RuntimeError",
        "in fail",
        "builtins.FileNotFoundError: No such file or directory",
    ):
        assert piece in done.stderr, piece
    done = subprocess.run([*command, "texts"], capture_output=True, text=True)
    assert "sesame" in done.stderr
