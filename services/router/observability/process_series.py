"""The time series of several router processes in one exposition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.common.observability.metrics import ScrapedCollector

# What a process asks its siblings for; the answer is `series`.
QUESTION = "metrics"
LABEL = "process"

# Name, help and type of a metric, and name, labels and value of each sample.
Series = list[Any]


def series(registry: CollectorRegistry) -> Series:
    """All metrics of one process, as JSON can have them."""
    return [
        [one.name, one.documentation, one.type, [[s.name, s.labels, s.value] for s in one.samples]]
        for one in registry.collect()
    ]


def merged(processes: Mapping[int, Series]) -> CollectorRegistry:
    """The metrics of all processes, each series with the index of its process as a label."""
    families: dict[str, Metric] = {}
    for index, found in sorted(processes.items()):
        for name, documentation, kind, samples in found:
            family = families.setdefault(name, Metric(name, documentation, kind))
            for sample, labels, value in samples:
                family.add_sample(sample, {LABEL: str(index), **labels}, value)
    registry = CollectorRegistry()
    registry.register(ScrapedCollector(families.values))
    return registry
