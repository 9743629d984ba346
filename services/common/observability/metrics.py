"""Prometheus exposition: plain numbers that are read at each scrape, on a registry of our own.

Parts count in plain integers and histograms; a role's metrics file declares names, helps and labels, and
reads them at scrape time, so nothing on a request's path updates metrics objects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from services.common.observability.histogram import Histogram

# In it a thread that waits for Python's lock gets it.
_PAUSE_S = 0.0002

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(label values, value) of each time series."""

Source = TypeVar("Source")
Value = float | Histogram


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """A row of a table of metrics: name, help and labels, and how it is read from a source.

    Names of counters end in `_total`; times are in seconds, sizes in bytes. `read` returns a value, or with
    labels (label values, value) of each time series; None omits the metric.
    """

    name: str
    help: str
    read: Callable[[Source], Value | Iterable[tuple[tuple[str, ...], Value]] | None]
    labels: tuple[str, ...] = ()

    def collect(self, source: Source, constant: Mapping[str, str]) -> PrometheusMetric | None:
        """Reads the metric. Every time series gets the `constant` labels too."""
        value = self.read(source)
        if value is None:
            return None
        names = [*constant, *self.labels]
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        numbers = kind(self.name, self.help, labels=names)
        histograms = HistogramMetricFamily(self.name, self.help, labels=names)
        for labels, one in [((), value)] if isinstance(value, int | float | Histogram) else value:
            values = [*constant.values(), *labels]
            if isinstance(one, Histogram):
                buckets = [(_bound(bound), float(count)) for bound, count in one.cumulative()]
                histograms.add_metric(values, buckets, one.sum)
            else:
                numbers.add_metric(values, one)
        return histograms if histograms.samples else numbers


def collect(
    table: Iterable[Metric[Source]], source: Source, constant: Mapping[str, str]
) -> Iterator[PrometheusMetric]:
    """Reads the metrics of a table, in order."""
    for row in table:
        metric = row.collect(source, constant)
        if metric is not None:
            yield metric


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


class ScrapedCollector(Collector):
    """Metrics that `read` makes when they are asked for."""

    def __init__(self, read: Callable[[], Iterable[PrometheusMetric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[PrometheusMetric]:
        """Everything, as it is now."""
        return self._read()

    def describe(self) -> Iterable[PrometheusMetric]:
        """Reads nothing at registration: what is read may not be there yet."""
        return ()


def process_metrics(registry: CollectorRegistry, namespace: str = "", pid: int | None = None) -> None:
    """Registers CPU time, memory and file descriptors of a process; its own where no pid is given."""
    ProcessCollector(namespace=namespace, pid=(lambda: pid) if pid else (lambda: "self"), registry=registry)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns the response to a scraper that sent this Accept header: body and content type. For threads:
    pauses between two metrics, so that the process's event loop runs."""
    parts, content_type = _parts(_Paced(registry), accept)
    return b"".join(parts), content_type


async def render_on_loop(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The same on an event loop, which runs what else is ready between two metrics."""
    parts, content_type = _parts(registry, accept)
    body = bytearray()
    for part in parts:
        body += part
        await asyncio.sleep(0)
    return bytes(body), content_type


def _parts(registry: Collector, accept: str) -> tuple[Iterator[bytes], str]:
    """The body in parts of one metric each, and the content type."""
    encode, content_type = choose_encoder(accept)
    end = encode(CollectorRegistry())  # of OpenMetrics, which marks it

    def parts() -> Iterator[bytes]:
        for metric in registry.collect():
            alone = ScrapedCollector(partial(iter, (metric,)))
            yield encode(alone).removesuffix(end)
        yield end

    return parts(), content_type


def paced(registry: CollectorRegistry) -> CollectorRegistry:
    """The registry for a thread that encodes it, which then pauses between two metrics."""
    return cast(CollectorRegistry, _Paced(registry))


class _Paced(Collector):
    """A registry whose reader pauses between two metrics. Some hundred series take 5 ms to encode, in which a
    thread would keep Python's lock, and no stream of its process would get a token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.restricted_registry = registry.restricted_registry

    def collect(self) -> Iterator[PrometheusMetric]:
        for metric in self._registry.collect():
            yield metric
            time.sleep(_PAUSE_S)
