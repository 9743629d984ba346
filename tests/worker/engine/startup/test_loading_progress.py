"""A bar for people, lines for others, and nothing for what is done at once."""

from __future__ import annotations

import io

import structlog
from structlog.testing import capture_logs

from services.worker.engine.startup.loading_progress import LoadingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def load(stream: io.StringIO, seconds: int) -> list[dict[str, object]]:
    """A gigabyte a second; what was logged."""
    clock = Clock()
    with capture_logs() as logs, LoadingProgress(stream, clock) as progress:
        for second in range(1, seconds + 1):
            clock.now = float(second)
            progress(second * 10**9, seconds * 10**9)
    return [dict(entry) for entry in logs]


def test_log_lines_at_intervals_and_at_the_end() -> None:
    stream = io.StringIO()
    *lines, last = load(stream, 7)
    assert [(line["event"], line["done_bytes"], line["total_bytes"]) for line in lines] == [
        ("weights_loading", 3 * 10**9, 7 * 10**9),
        ("weights_loading", 6 * 10**9, 7 * 10**9),
    ]
    assert (last["event"], last["bytes"], last["seconds"], last["gb_s"]) == (
        "weights_loaded", 7 * 10**9, 7.0, 1.0,
    )  # fmt: skip
    assert stream.getvalue() == ""


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with structlog.contextvars.bound_contextvars(worker="decode-0"):
        (last,) = load(stream, 4)
    assert last["event"] == "weights_loaded"
    assert "decode-0 weights" in stream.getvalue()
    assert "4.0/4.0 GB" in stream.getvalue()


class Gone(Terminal):
    """A terminal whose other end is closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_closed_terminal_does_not_fail_loading() -> None:
    assert load(Gone(), 4)[-1]["event"] == "weights_loaded"


def test_fast_loading_shows_no_bar() -> None:
    stream = Terminal()
    with capture_logs(), LoadingProgress(stream, Clock()) as progress:
        progress(10, 10)
    assert stream.getvalue() == ""


def test_a_failure_is_not_logged_as_loaded() -> None:
    with capture_logs() as logs:
        try:
            with LoadingProgress(Terminal(), Clock()):
                raise ValueError
        except ValueError:
            pass
    assert logs == []
