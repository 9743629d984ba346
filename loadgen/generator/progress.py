"""Live display of a run: offered and achieved rate, requests in flight, attainment so far, lag of the
generator."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.common.formatting import number, percent
from loadgen.common.settings import Settings
from loadgen.generator.processes import Progress

_RECENT = 20  # reports: the last five seconds


class ProgressView:
    """Draws on stderr if that is a terminal. Its `watch` is called with every report; `go_on` decides whether
    the run continues.
    """

    def __init__(
        self, settings: Settings, title: str, go_on: Callable[[Progress], bool] = lambda _: True
    ) -> None:
        self._settings = settings
        self._title = title
        self._go_on = go_on
        self._recent: deque[Progress] = deque(maxlen=_RECENT)
        self._live: Live | None = None
        if sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def watch(self, progress: Progress) -> bool:
        """Shows new progress; returns False if the run should end."""
        self._recent.append(progress)
        if self._live is not None:
            self._live.update(self.render())
        return self._go_on(progress)

    def render(self) -> Group:
        """Returns the lines that are displayed."""
        now, before = self._recent[-1], self._recent[0]
        seconds = max(1e-9, now.elapsed_s - before.elapsed_s)
        cells = [
            ("offered/s", number(self._offered(now, before, seconds))),
            ("sent/s", number((now.sent - before.sent) / seconds)),
            ("ended/s", number((now.ended - before.ended) / seconds)),
            ("tokens/s", number((now.tokens - before.tokens) / seconds)),
            ("in flight", str(now.in_flight)),
            ("failed", str(now.failed)),
            ("good so far", percent(now.good / now.ended if now.ended else None)),
            ("lag ms", number(max(one.lag_ms for one in self._recent))),
        ]
        table = Table.grid(padding=(0, 2))
        for _ in cells:
            table.add_column(justify="right")
        table.add_row(*(Text(name, style="dim") for name, _ in cells))
        table.add_row(*(Text(value) for _, value in cells))
        share = self._share(now)
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=1.0, completed=share, width=30),
            Text(f"{now.elapsed_s:.0f} s", style="dim"),
        )
        return Group(line, table)

    def _offered(self, now: Progress, before: Progress, seconds: float) -> float | None:
        """The offered rate: as requested, or measured recently where it varies. None in a closed loop."""
        load = self._settings.load
        if load.rate is not None or load.concurrency is not None:
            return load.rate
        return (now.due - before.due) / seconds

    def _share(self, now: Progress) -> float:
        load = self._settings.load
        shares = [0.0]
        if load.num_requests is not None:
            shares.append(now.ended / load.num_requests)
        if load.duration_s is not None:
            shares.append(now.elapsed_s / load.duration_s)
        return min(1.0, max(shares))
