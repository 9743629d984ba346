"""Shows the progress of weight loading: a bar where stderr is a terminal, else a log line every few
seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from baton.base.structured_logs import structlog
from services.common.observability.logs import get_log

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

# Loading that is done sooner shows nothing.
_SHOW_AFTER_S = 1.0
_LINE_S = 3.0
_FRAME_S = 0.1

log = get_log(__name__)


class LoadingProgress:
    """A context manager to be called within its block with the bytes done and the bytes in total, from one
    thread. A block that ends without an error logs how long it took."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._done = 0
        self._began = self._shown = clock()
        self._bar: tuple[Bar, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        self._done, now = done, self._clock()
        if now - self._began < _SHOW_AFTER_S:
            return
        on_terminal = self._stream.isatty()
        if now - self._shown < (_FRAME_S if on_terminal else _LINE_S):
            return
        self._shown = now
        if on_terminal:
            self._draw(done, total)
        else:
            log.info("weights_loading", done_bytes=done, total_bytes=total)

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            bar, task = self._bar
            with contextlib.suppress(OSError):
                bar.update(task, completed=self._done, refresh=True)
                bar.stop()
        if error is None:
            seconds = self._clock() - self._began
            speed = self._done / 1e9 / max(seconds, 1e-9)
            log.info("weights_loaded", bytes=self._done, seconds=round(seconds, 2), gb_s=round(speed, 2))

    def _draw(self, done: int, total: int) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not fail the start
            if self._bar is None:
                self._bar = _bar(self._stream, total)
            bar, task = self._bar
            bar.update(task, completed=done, refresh=True)


def _bar(stream: TextIO, total: int) -> tuple[Bar, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    # Drawn on progress: no thread of its own in the engine. It is not erased, since that could erase a line
    # that another process has written since.
    bar = Progress(*columns, console=Console(file=stream), auto_refresh=False)
    worker = structlog.contextvars.get_contextvars().get("worker", "")
    task = bar.add_task(f"{worker} weights".strip(), total=total)
    bar.start()
    return bar, task
