"""The recorder never blocks: what finds no room is dropped and counted, whatever the exporter does."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from services.common.observability.tracing.context import TraceContext
from services.common.observability.tracing.recorder import BATCH, SpanRecorder
from services.common.observability.tracing.span import Span
from tests.support.kept_spans import KeptSpans

CONTEXT = TraceContext(b"t" * 16, b"s" * 8, sampled=True)


def spans(count: int, first: int = 0) -> list[Span]:
    return [Span(str(number), CONTEXT, None, 1, 2) for number in range(first, first + count)]


class Gate:
    """An exporter that waits until it is opened or closed, and then answers `reasons`, one a batch."""

    def __init__(self, *reasons: str) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.closed = False
        self.batches: list[int] = []
        self._reasons = list(reasons)

    def export(self, batch: Sequence[Span]) -> str:
        self.entered.set()
        self.opened.wait(60)
        self.batches.append(len(batch))
        return self._reasons.pop(0) if self._reasons else ""

    def close(self) -> None:
        self.closed = True
        self.opened.set()


def test_all_are_exported_in_order_and_in_batches() -> None:
    kept = KeptSpans()
    for first in range(0, 300, 3):
        kept.recorder.record(spans(3, first))
    assert [span.name for span in kept.all()] == [str(number) for number in range(300)]
    assert kept.recorder.exported == 300
    assert kept.recorder.dropped() == [(("queue_full",), 0), (("export_failed",), 0)]


def test_a_batch_is_bounded_and_close_exports_the_rest() -> None:
    gate = Gate()
    recorder = SpanRecorder(gate, interval_s=3600.0)
    recorder.record(spans(2 * BATCH + 1))
    gate.opened.set()
    recorder.close(10.0)
    assert gate.batches == [BATCH, BATCH, 1]
    assert gate.closed


def test_an_exporter_that_hangs_fills_the_queue_and_no_more() -> None:
    gate = Gate()
    recorder = SpanRecorder(gate, capacity=10, interval_s=0.001)
    recorder.record(spans(1))
    assert gate.entered.wait(30)  # it has that one
    recorder.record(spans(7))
    recorder.record(spans(7))
    recorder.record(spans(5))
    assert recorder.crowded_out == 9
    recorder.close(0.01)  # not for as long as the exporter hangs
    assert gate.closed
    recorder.close(10.0)
    assert gate.batches == [1]  # what was queued is lost


def test_failed_batches_are_counted_and_logged_once() -> None:
    gate = Gate("refused", "refused", "")
    gate.opened.set()
    with capture_logs() as logs:
        recorder = SpanRecorder(gate, interval_s=3600.0)
        recorder.record(spans(3 * BATCH))
        recorder.close(10.0)
    assert (recorder.exported, recorder.failed) == (BATCH, 2 * BATCH)
    assert [(log["event"], log.get("reason")) for log in logs] == [
        ("traces_not_exported", "refused"),
        ("traces_exported_again", None),
    ]


def test_an_exporter_that_raises_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.opened.set()
    works = gate.export

    def broken(batch: Sequence[Span]) -> str:
        if not gate.batches:
            works(batch)
            raise RuntimeError
        return works(batch)

    monkeypatch.setattr(gate, "export", broken)
    recorder = SpanRecorder(gate, interval_s=3600.0)
    recorder.record(spans(BATCH + 1))
    recorder.close(10.0)
    assert (recorder.exported, recorder.failed) == (1, BATCH)
