"""Prometheus exposition: tables of metrics that are read at a scrape, on a registry of their own.

Components count in plain integers and histograms. A role's metrics module declares a table of families, so
nothing on a request's path knows about metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from baton.addresses import join_address
from services.common.grpc_server import bind_socket
from services.common.histogram import Histogram

_CONNECTION_S = 5.0
_STOP_POLL_S = 0.1

Source = TypeVar("Source")
Value = float | Histogram
# (label values, value) of each time series.
Samples = Iterable[tuple[tuple[str, ...], Value]]


@dataclass(frozen=True)
class Family(Generic[Source]):
    """A row of a table of metrics: name, help text, how to read it from a source, and its labels.

    `read` returns a value, or with labels the samples of all time series; None omits the family. Names of
    counters end in `_total`; times are in seconds, sizes in bytes.
    """

    name: str
    help: str
    read: Callable[[Source], Value | Samples | None]
    labels: tuple[str, ...] = ()

    def collect(self, source: Source, constant: Mapping[str, str]) -> Metric | None:
        """Reads the family. Every time series gets the `constant` labels too."""
        value = self.read(source)
        if value is None:
            return None
        samples = [((), value)] if isinstance(value, int | float | Histogram) else list(value)
        names = [*constant, *self.labels]
        if samples and isinstance(samples[0][1], Histogram):
            histograms = HistogramMetricFamily(self.name, self.help, labels=names)
            for labels, histogram in samples:
                assert isinstance(histogram, Histogram)
                buckets = [(_bound(bound), float(count)) for bound, count in histogram.cumulative()]
                histograms.add_metric([*constant.values(), *labels], buckets, histogram.sum)
            return histograms
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self.help, labels=names)
        for labels, number in samples:
            family.add_metric([*constant.values(), *labels], number)
        return family


def collect(table: Iterable[Family[Source]], source: Source, constant: Mapping[str, str]) -> Iterator[Metric]:
    """Reads every family of a table, in order."""
    for family in table:
        metric = family.collect(source, constant)
        if metric is not None:
            yield metric


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


class ScrapedCollector(Collector):
    """Calls `read` at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The metrics with their present values."""
        return self._read()

    def describe(self) -> Iterable[Metric]:
        """Nothing: at registration the sources may not exist yet."""
        return ()


def process_metrics(registry: CollectorRegistry, namespace: str = "", pid: int | None = None) -> None:
    """Registers CPU time, memory and file descriptors of a process; None: of this one."""
    ProcessCollector(namespace=namespace, pid=(lambda: pid) if pid else (lambda: "self"), registry=registry)


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The body and content type for a scraper that sent this Accept header."""
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class MetricsServer:
    """An HTTP endpoint for scrapes, one at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._server: WSGIServer | None = None

    def start(self, registry: CollectorRegistry, host: str, port: int) -> str:
        """Serves the registry and returns `host:port`. BatonError(INVALID) if the port is in use."""
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
        """Stops the thread and closes the port."""
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()


class _Handler(WSGIRequestHandler):
    # The longest that a client which sends or reads nothing delays others.
    timeout = _CONNECTION_S

    def log_message(self, format: str, *args: object) -> None:
        """Does not log scrapes."""
