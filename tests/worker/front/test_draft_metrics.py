"""Metrics of drafts, as an engine's integrity report has them."""

from __future__ import annotations

from baton.v1.worker_pb2 import DraftReport, IntegrityReport
from services.worker.front.metrics import REPORTED


def read(name: str, report: IntegrityReport) -> object:
    (metric,) = [one for one in REPORTED if one.name == f"baton_worker_{name}"]
    return metric.read(report)


def test_drafts_are_counted_by_source_and_depth() -> None:
    text = DraftReport(source="text", rows=[5, 2], accepted=[3, 1])
    report = IntegrityReport(
        sequence_steps=7, drafts=[text, DraftReport(source="table", rows=[4, 0], accepted=[0, 0])]
    )
    assert read("sequence_steps_total", report) == 7
    assert read("draft_rows_total", report) == [
        (("text", "1"), 5), (("text", "2"), 2), (("table", "1"), 4), (("table", "2"), 0),
    ]  # fmt: skip
    assert read("accepted_drafts_total", report) == [
        (("text", "1"), 3), (("text", "2"), 1), (("table", "1"), 0), (("table", "2"), 0),
    ]  # fmt: skip
    assert read("draft_rows_total", IntegrityReport()) == []
