"""Metrics of mixtures of experts: for other models there are none."""

from __future__ import annotations

from typing import Any

from baton.v1.worker_pb2 import Audit, ExpertsAudit
from services.worker.front.metrics import AUDITED


def read(name: str, audit: Audit) -> Any:
    (metric,) = [one for one in AUDITED if one.name == f"baton_worker_{name}"]
    return metric.read(audit)


def test_experts_and_their_imbalance() -> None:
    audit = Audit(experts=ExpertsAudit(count=128, taken=8, imbalance=1.5))
    assert read("experts", audit) == [(("layer",), 128), (("token",), 8)]
    assert read("expert_imbalance", audit) == 1.5


def test_a_model_without_experts_has_neither() -> None:
    assert read("experts", Audit()) == []
    assert read("expert_imbalance", Audit()) is None
