"""A frame of `baton status --watch`: rates, latencies, one row per worker, one cell per slot."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.v1 import admin_pb2, router_pb2, worker_pb2
from services.cli.status.slow_worker import slow_worker
from services.cli.status.source import is_partial
from services.cli.status.view import (
    NO_WORKERS,
    decodes,
    device_lines,
    headline,
    latency_table,
    name_of,
    problems,
    rates_line,
    store_problem,
    worker_table,
)

# (cell, style) by slot state; a cell that covers several slots shows the busiest.
_CELLS = {
    worker_pb2.SLOT_STATE_UNSPECIFIED: ("·", "dim"),
    worker_pb2.SLOT_STATE_FREE: ("·", "dim"),
    worker_pb2.SLOT_STATE_RESERVED: ("▒", "yellow"),
    worker_pb2.SLOT_STATE_ACTIVE: ("█", "green"),
}
_WORDS = (
    (worker_pb2.SLOT_STATE_FREE, "free"),
    (worker_pb2.SLOT_STATE_RESERVED, "reserved"),
    (worker_pb2.SLOT_STATE_ACTIVE, "active"),
)
_BARS = " ▁▂▃▄▅▆▇█"
_MAP_LINES = 3
_NAME_WIDTH = 18
HISTORY = 120


class WatchView:
    """Draws frames; keeps the output tokens per second of the last ones for the sparkline."""

    def __init__(self) -> None:
        self._history: deque[int] = deque(maxlen=HISTORY)

    def draw(self, answer: admin_pb2.AdminServiceGetStatusResponse, width: int) -> RenderableType:
        """A frame at most `width` columns wide."""
        workers, router = list(answer.workers), answer.router
        self._history.append(sum(worker.worker.report.recent_decode.tokens for worker in workers))
        parts: list[RenderableType] = [_title(router), rates_line(router)]
        latencies = latency_table(router)
        parts.append(_beside(latencies, sparkline(list(self._history), max(10, width - 60))))
        if is_partial(answer):
            return Group(*parts, "", NO_WORKERS)
        parts += ["", worker_table(workers, width), *device_lines(workers)]
        parts += ["", *_slot_maps(workers, width), *problems(workers)]
        if away := store_problem(answer):
            parts.append(away)
        if slow := slow_worker(workers):
            parts.append(slow.line())
        return Group(*parts)


def failure(reason: str) -> RenderableType:
    """A frame for a router that does not answer."""
    return Text.assemble((reason, "bold red"), "\nretrying; q quits")


def _title(router: router_pb2.RouterStatus) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    line.add_row(headline(router), Text(f"{time.strftime('%H:%M:%S')}  q quits", "dim"))
    return line


def _beside(left: RenderableType, spark: Text) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_row(left, Text.assemble(("output tokens/s\n", "dim"), "\n", spark))
    return grid


def sparkline(values: list[int], width: int) -> Text:
    """The last `width` values as bars relative to their maximum, with the latest and the maximum as
    numbers."""
    shown = values[-width:]
    top = max(shown, default=0)
    bars = "".join(_BARS[-(-value * (len(_BARS) - 1) // top)] if top else _BARS[0] for value in shown)
    return Text.assemble((bars, "cyan"), (f" {shown[-1] if shown else 0}", "bold"), (f" max {top}", "dim"))


def _slot_maps(workers: list[admin_pb2.WorkerStatus], width: int) -> list[RenderableType]:
    """The legend, and one or more lines for each worker that decodes."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=_NAME_WIDTH)
    grid.add_column(overflow="fold")
    names = [name_of(worker) for worker in workers if decodes(worker)]
    room = width - min(_NAME_WIDTH, max(map(len, names), default=0)) - 2
    merged = False
    for worker in workers:
        if decodes(worker):
            slots, each = slot_map(list(worker.worker.report.slot_states), room)
            merged |= each > 1
            grid.add_row(name_of(worker), slots)
    legend = Text("slots: ", "dim")
    for state, word in _WORDS:
        legend.append(*_CELLS[state]).append(f" {word}  ", "dim")
    if merged:
        legend.append("(one cell covers several slots and shows the busiest)", "dim")
    return [legend, grid]


def slot_map(
    states: list[worker_pb2.SlotState.ValueType], room: int, lines: int = _MAP_LINES
) -> tuple[Text, int]:
    """One cell per slot in at most `lines` lines of `room` columns, and the number of slots that share a
    cell."""
    each = max(1, -(-len(states) // (room * lines)))
    cells = Text()
    for start in range(0, len(states), each):
        cells.append(*_CELLS[max(states[start : start + each])])
    return cells, each
