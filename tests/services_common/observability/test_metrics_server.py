"""The endpoint beside a process's work: it answers, gives its port back, and fails aloud."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import BatonError, ErrorKind
from services.common.observability.histogram import Histogram
from services.common.observability.metrics import Metric, MetricsServer, ScrapedCollector, collect

TABLE: tuple[Metric[Histogram], ...] = (
    Metric("baton_test_things_total", "Things.", lambda took: [(("a",), 2), (("b",), 3)], ("kind",)),
    Metric("baton_test_took_seconds", "Time.", lambda took: took),
)


def registry_of(read: Iterator[PrometheusMetric] | None = None) -> CollectorRegistry:
    def default() -> Iterator[PrometheusMetric]:
        took = Histogram()
        took.observe(0.02)
        yield from collect(TABLE, took, {"role": "r"})

    registry = CollectorRegistry()
    registry.register(ScrapedCollector(lambda: read or default()))
    return registry


async def scrape(address: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10, verify=False) as client:
        return await client.get(f"http://{address}/metrics")


async def test_it_serves_metrics_and_frees_its_port() -> None:
    server = MetricsServer()
    address = server.start(registry_of(), "127.0.0.1", 0)
    families = {
        family.name: family for family in text_string_to_metric_families((await scrape(address)).text)
    }
    assert {(s.labels["kind"], s.value) for s in families["baton_test_things"].samples} == {
        ("a", 2),
        ("b", 3),
    }
    assert families["baton_test_took_seconds"].type == "histogram"
    buckets = {
        s.labels["le"]: s.value for s in families["baton_test_took_seconds"].samples if "le" in s.labels
    }
    assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0, 1, 1)
    await server.stop()
    again = MetricsServer()
    assert again.start(registry_of(), "127.0.0.1", int(address.rsplit(":", 1)[1])) == address
    await again.stop()


async def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BatonError, match=r"cannot listen on 127\.0\.0\.1") as failed:
            MetricsServer().start(registry_of(), "127.0.0.1", taken.getsockname()[1])
    assert failed.value.kind is ErrorKind.INVALID


async def test_a_silent_client_blocks_others_only_until_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.observability.metrics._Handler.timeout", 0.2)
    server = MetricsServer()
    address = server.start(registry_of(), "127.0.0.1", 0)
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))  # and sends nothing
    assert (await scrape(address)).status_code == 200
    writer.close()
    await server.stop()


async def test_stop_without_start() -> None:
    await MetricsServer().stop()
