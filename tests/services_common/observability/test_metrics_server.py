"""The endpoint beside a process's work: it answers, gives its port back, and fails aloud."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from baton.base.errors import BatonError, ErrorKind
from services.common.observability.histogram import Histogram
from services.common.observability.metrics import (
    Metric,
    ScrapedCollector,
    collect,
    render,
    render_on_loop,
)
from services.common.observability.metrics_server import MetricsServer

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
    address = await server.start(registry_of(), "127.0.0.1", 0)
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
    assert await again.start(registry_of(), "127.0.0.1", int(address.rsplit(":", 1)[1])) == address
    await again.stop()


async def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BatonError, match=r"cannot listen on 127\.0\.0\.1") as failed:
            await MetricsServer().start(registry_of(), "127.0.0.1", taken.getsockname()[1])
    assert failed.value.kind is ErrorKind.INVALID


async def test_what_prometheus_may_ask_for() -> None:
    server = MetricsServer()
    address = await server.start(registry_of(), "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        plain = await client.get("/metrics", headers={"accept-encoding": "identity"})
        packed = await client.get("/metrics", headers={"accept-encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.text == plain.text
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        assert (await client.get("/metrics", headers=accept)).text.endswith("# EOF\n")
        assert (await client.post("/metrics")).status_code == 405
    await server.stop()


async def test_stop_without_start() -> None:
    await MetricsServer().stop()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
async def test_a_body_is_the_same_whether_it_is_encoded_at_once_or_in_parts(accept: str) -> None:
    encode, content_type = choose_encoder(accept)
    whole = encode(registry_of()), content_type
    assert whole[0].count(b"# TYPE") == len(TABLE)
    assert render(registry_of(), accept) == whole
    assert await render_on_loop(registry_of(), accept) == whole


async def test_an_event_loop_runs_between_two_metrics() -> None:
    order: list[str] = []

    def read() -> Iterator[PrometheusMetric]:
        for metric in collect(TABLE, Histogram(), {}):
            order.append(metric.name)
            yield metric

    async def others() -> None:
        for _ in range(2):
            order.append("another")
            await asyncio.sleep(0)

    await asyncio.gather(render_on_loop(registry_of(read()), ""), others())
    assert order == ["baton_test_things", "another", "baton_test_took_seconds", "another"]


async def test_a_thread_that_encodes_gives_way_between_two_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr("services.common.observability.metrics.time.sleep", paused.append)
    server = MetricsServer()
    address = await server.start(registry_of(), "127.0.0.1", 0)
    try:
        answer = await scrape(address)
    finally:
        await server.stop()
    assert "baton_test_took_seconds_count" in answer.text
    assert len(paused) == len(TABLE)
    assert min(paused) > 0
