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
        """Nothing is read at registration: what is read may not be there yet."""
        return ()


def process_metrics(registry: CollectorRegistry, namespace: str = "", pid: int | None = None) -> None:
    """CPU time, memory and file descriptors of a process; its own where no pid is given."""
    ProcessCollector(namespace=namespace, pid=(lambda: pid) if pid else (lambda: "self"), registry=registry)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """What a scraper gets that sent this Accept header: body and content type. For threads: pauses between
    two metrics, so that the process's event loop runs."""
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
        server.set_app(make_wsgi_app(_Paced(registry)))
        self._server = server
        Thread(target=server.serve_forever, args=(_STOP_POLL_S,), name="metrics", daemon=True).start()
        return join_address(host, server.server_port)

    async def stop(self) -> None:
        """Ends the thread and closes the port."""
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()


class _Handler(WSGIRequestHandler):
    # The longest that a client that neither sends nor reads can delay others.
    timeout = _CONNECTION_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""
