"""What an operator sees while weights come: a bar where stderr is a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import structlog

from services.common.logs import get_log

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

# What is done sooner needs no bar.
_PATIENCE_S = 1.0
_LINE_S = 3.0
_FRAME_S = 0.1

log = get_log(__name__)


class LoadingProgress:
    """Call it within its block with bytes done and in all, as often as there is news, from one thread.

    Where the block ends well, a line says how long it took.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._done = 0
        self._began = self._told = clock()
        self._bar: tuple[Bar, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        self._done, now = done, self._clock()
        if now - self._began < _PATIENCE_S:
            return
        on_terminal = self._stream.isatty()
        if now - self._told < (_FRAME_S if on_terminal else _LINE_S):
            return
        self._told = now
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
        with contextlib.suppress(OSError):  # a terminal that is gone must stop nothing
            if self._bar is None:
                self._bar = _bar(self._stream, total)
            bar, task = self._bar
            bar.update(task, completed=done, refresh=True)


def _bar(stream: TextIO, total: int) -> tuple[Bar, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    # Drawn when there is news: a thread of its own would be one more in the engine. It stays, since what
    # removes it would remove a line that another process has written meanwhile.
    bar = Progress(*columns, console=Console(file=stream), auto_refresh=False)
    worker = structlog.contextvars.get_contextvars().get("worker", "")
    task = bar.add_task(f"{worker} weights".strip(), total=total)
    bar.start()
    return bar, task
