"""The table of metrics in docs/operations.md matches the code."""

from __future__ import annotations

import re
from pathlib import Path

from services.router.observability import metrics as router_metrics
from services.worker.front import metrics as worker_metrics

MANUAL = Path(__file__).parents[3] / "docs" / "operations.md"


def test_the_manual_has_a_row_for_each_metric() -> None:
    """With its labels and its help text."""
    rows = re.findall(r"^\| `(baton_\w+)` \| ([^|]*) \| (.*) \|$", MANUAL.read_text("utf-8"), re.MULTILINE)
    families = (*router_metrics.FAMILIES, *worker_metrics.FAMILIES)
    assert rows == [(family.name, ", ".join(family.labels) or "–", family.help) for family in families]
