"""Hands ended spans to an exporter in a thread of its own. Never blocks: what finds no room is dropped and
counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from services.common.observability.logs import get_log
from services.common.observability.tracing.span import Span

# About 1 KB each.
CAPACITY = 8192
# Each takes about 0.1 ms to encode (`process_tuning.switch_threads_often`).
BATCH = 128
_INTERVAL_S = 1.0

_log = get_log("tracing")


class SpanExporter(Protocol):
    """Sends spans to a collector."""

    def export(self, spans: Sequence[Span]) -> str:
        """Sends a batch within the exporter's deadline; why that failed, or "". Called by one thread."""

    def close(self) -> None:
        """Ends an export that waits to try again, and closes connections. Called by any thread."""


class SpanRecorder:
    """Collects the spans of one process and exports them. `record` is for one thread."""

    def __init__(
        self, exporter: SpanExporter, capacity: int = CAPACITY, interval_s: float = _INTERVAL_S
    ) -> None:
        """`interval_s`: how long spans are collected before they are exported."""
        self._exporter = exporter
        self._capacity = capacity
        self._interval_s = interval_s
        # Appended to by the recording thread, taken from by the exporting one.
        self._spans: deque[Span] = deque()
        self._closing, self._closed = threading.Event(), threading.Event()
        self._failing = False
        # Counts since the start: exported, refused without room, and lost because an export failed.
        self.exported = self.crowded_out = self.failed = 0
        self._thread = threading.Thread(target=self._run, name="trace-export", daemon=True)
        self._thread.start()

    def dropped(self) -> list[tuple[tuple[str], int]]:
        """Lost spans, by reason, as samples of a metric."""
        return [(("queue_full",), self.crowded_out), (("export_failed",), self.failed)]

    def record(self, spans: Sequence[Span]) -> None:
        """Queues spans for export, or drops those that find no room."""
        room = max(0, self._capacity - len(self._spans))
        self._spans.extend(spans[:room])
        self.crowded_out += len(spans[room:])

    def close(self, timeout_s: float) -> None:
        """Exports what is queued, within `timeout_s`; the rest is lost. Blocks; nothing may be recorded any
        more."""
        self._closing.set()
        self._thread.join(timeout_s)
        self._closed.set()
        self._exporter.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._interval_s)
            while self._spans and not self._closed.is_set():
                count = min(BATCH, len(self._spans))
                self._export([self._spans.popleft() for _ in range(count)])

    def _export(self, batch: Sequence[Span]) -> None:
        try:
            reason = self._exporter.export(batch)
        except Exception as error:  # whatever it is, the thread goes on with the next batch
            reason = type(error).__name__
        if not reason:
            self.exported += len(batch)
            if self._failing:
                _log.info("traces_exported_again")
        else:
            self.failed += len(batch)
            if not self._failing:
                _log.error("traces_not_exported", reason=reason)
        self._failing = bool(reason)
