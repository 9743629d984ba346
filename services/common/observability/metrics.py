"""Prometheus exposition: plain numbers that are read when somebody asks, on a registry of our own.

Parts count in plain integers and histograms; a role's metrics file declares names, helps and labels, and
reads them at scrape time, so nothing on a request's path knows of metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Thread
from typing import Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from baton.addresses import join_address
from services.common.observability.histogram import Histogram
from services.common.rpc.grpc_server import bind_socket

_CONNECTION_S = 5.0
_STOP_POLL_S = 0.1

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(label values, value) of each time series."""


class Family:
    """One declared metric: its name, help and labels, and how its samples are read.

    Names of counters end in `_total`; times are in seconds, sizes in bytes.
    """

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = help_text
        self.labels = labels

    def metric(self, samples: Samples, constant: Mapping[str, str]) -> PrometheusMetric:
        """These samples as Prometheus's own kind of object, with the labels every metric here has."""
        names = [*constant, *self.labels]
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self.help, labels=names)
        for labels, value in samples:
            family.add_metric([*constant.values(), *labels], value)
        return family

    def histograms(
        self, samples: Iterable[tuple[tuple[str, ...], Histogram]], constant: Mapping[str, str]
    ) -> PrometheusMetric:
        """The same for histograms."""
        family = HistogramMetricFamily(self.name, self.help, labels=[*constant, *self.labels])
        for labels, histogram in samples:
            buckets = [(_bound(bound), float(count)) for bound, count in histogram.cumulative()]
            family.add_metric([*constant.values(), *labels], buckets, histogram.sum)
        return family


Source = TypeVar("Source")
Value = float | Histogram


class Metric(Family, Generic[Source]):
    """A row of a table of metrics: a family, and how its samples are read from a source.

    `read` returns a value, or with labels (label values, value) of each time series; None omits the metric.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        read: Callable[[Source], Value | Iterable[tuple[tuple[str, ...], Value]] | None],
        labels: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, help_text, labels)
        self._read = read

    def collect(self, source: Source, constant: Mapping[str, str]) -> PrometheusMetric | None:
        """Reads the metric. Every time series gets the `constant` labels too."""
        value = self._read(source)
        if value is None:
            return None
        samples = [((), value)] if isinstance(value, int | float | Histogram) else list(value)
        numbers = [(labels, one) for labels, one in samples if not isinstance(one, Histogram)]
        histograms = [(labels, one) for labels, one in samples if isinstance(one, Histogram)]
        return self.histograms(histograms, constant) if histograms else self.metric(numbers, constant)


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
        """Nothing is read at registration: what is read may not be there yet."""
        return ()


def process_metrics(registry: CollectorRegistry, namespace: str = "", pid: int | None = None) -> None:
    """CPU time, memory and file descriptors of a process; its own where no pid is given."""
    ProcessCollector(namespace=namespace, pid=(lambda: pid) if pid else (lambda: "self"), registry=registry)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """What a scraper gets that sent this Accept header: body and content type."""
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class MetricsServer:
    """A small HTTP endpoint beside a process's real work; one scrape at a time, on a thread."""

    def __init__(self) -> None:
        self._server: WSGIServer | None = None

    def start(self, registry: CollectorRegistry, host: str, port: int) -> str:
        """Serves the registry; returns `host:port`. BatonError(INVALID) where the port is taken."""
        bound = bind_socket(host, port)
        server = WSGIServer((host, port), _Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = bound
        server.server_address = bound.getsockname()
        server.server_name, server.server_port = host, bound.getsockname()[1]
        server.setup_environ()
        server.server_activate()
        server.set_app(make_wsgi_app(registry))
        self._server = server
        Thread(target=server.serve_forever, args=(_STOP_POLL_S,), name="metrics", daemon=True).start()
        return join_address(host, server.server_port)

    async def stop(self) -> None:
        """Ends the thread and closes the port."""
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()


class _Handler(WSGIRequestHandler):
    # A client that says nothing, or reads nothing, holds up others for so long and no longer.
    timeout = _CONNECTION_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not news."""
