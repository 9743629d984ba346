"""Metrics of mixtures of experts: for other models there are none."""

from __future__ import annotations

from typing import Any

from baton.v1.worker_pb2 import ExpertsReport, IntegrityReport
from services.worker.front.metrics import REPORTED


def read(name: str, report: IntegrityReport) -> Any:
    (metric,) = [one for one in REPORTED if one.name == f"baton_worker_{name}"]
    return metric.read(report)


def test_experts_and_their_imbalance() -> None:
    report = IntegrityReport(experts=ExpertsReport(count=128, taken=8, imbalance=1.5))
    assert read("experts", report) == [(("layer",), 128), (("token",), 8)]
    assert read("expert_imbalance", report) == 1.5


def test_a_model_without_experts_has_neither() -> None:
    assert read("experts", IntegrityReport()) == []
    assert read("expert_imbalance", IntegrityReport()) is None
