"""The metrics of a group of workers: its own process, and the state of each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric

from services.cluster.group.probes import GroupProbes
from services.common.observability.metrics import Metric, Samples, ScrapedCollector, collect, process_metrics


def _by_worker(read: Callable[[GroupProbes, str], float]) -> Callable[[GroupProbes], Samples]:
    return lambda probes: [((name,), read(probes, name)) for name in probes.reports]


FAMILIES: tuple[Metric[GroupProbes], ...] = (
    Metric(
        "baton_group_worker_restarts_total",
        "Restarts of a worker by the group.",
        _by_worker(lambda probes, name: max(0, probes.reports[name].starts - 1)),
        ("worker",),
    ),
    Metric(
        "baton_group_worker_ready",
        "1 where the worker serves and is ready, else 0.",
        _by_worker(lambda probes, name: probes.ready(name)),
        ("worker",),
    ),
)


def group_registry(group: str, model: str, probes: GroupProbes) -> CollectorRegistry:
    """A registry of the group's metrics and those of this process. `model`: the served model's name."""
    labels = {"group": group, "model": model}

    def read() -> Iterator[PrometheusMetric]:
        yield from collect(FAMILIES, probes, labels)

    registry = CollectorRegistry()
    registry.register(ScrapedCollector(read))
    process_metrics(registry)
    return registry
