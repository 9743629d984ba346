"""Fills the lookahead table from the slots' histories on a GPU: on a stream of its own, beside the steps."""

from __future__ import annotations

from baton.device.streams.cuda_stream import compute_stream
from baton.device.streams.stream import Event
from baton.engine.kernels.gpu.speculation.lookahead import fill_table
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_table import LookaheadTable, Output


class LookaheadFill:
    """Launches what learns outputs that have ended. Not thread-safe."""

    def __init__(self, table: LookaheadTable, history: History) -> None:
        """Compiles the kernel by a launch that learns nothing."""
        self._table = table
        self._history = history
        self._stream = compute_stream(table.cells.device)
        self._reads: dict[int, Event] = {}  # by slot, the ends of kernels that read its history
        self.learn(Output(slot=0, first=0, end=0, stamp=0))

    def learn(self, output: Output) -> None:
        """Enqueues what fills the table with an output."""
        table = self._table
        with self._stream.activate():
            fill_table(table, self._history, output)
            table.host_counts.copy_(table.counts, non_blocking=True)
            self._reads[output.slot] = self._stream.record_event()

    def take_reading(self, slot: int) -> Event | None:
        """The end of the kernel that read a slot's history last; None after it was taken."""
        return self._reads.pop(slot, None)
