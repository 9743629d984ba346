"""Export over OTLP/HTTP to a collector on loopback that takes spans, refuses them, hangs or is away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.common.config.tracing import TracingSettings
from services.common.observability.tracing.configured import configured_recorder
from services.common.observability.tracing.context import TraceContext
from services.common.observability.tracing.otlp import OtlpExporter
from services.common.observability.tracing.span import Span, SpanEvent
from tests.support.otlp_collector import OtlpCollector, otlp_collector

CONTEXT = TraceContext(bytes(range(16)), bytes(range(8)), sampled=True, state="a=1")
SPAN = Span(
    "one",
    CONTEXT,
    b"parent__",
    1_000,
    2_000,
    "client",
    {"text": "t", "number": 3, "share": 0.5, "flag": True, "list": ["a", "b"]},
    [SpanEvent("happened", 1_500, {"kind": "k"})],
    "overloaded",
)


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with otlp_collector() as running:
        yield running


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")


def exported(url: str, *, headers: Path | None = None) -> str:
    """The reason why a span was not exported."""
    settings = TracingSettings(otlp_endpoint=url, otlp_headers_file=headers)
    exporter = OtlpExporter(settings, {"service.name": "baton-test", "service.version": "1"})
    try:
        return exporter.export([SPAN])
    finally:
        exporter.close()


def test_a_span_arrives_as_it_is(
    collector: OtlpCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-more=3")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    headers = tmp_path / "headers"
    headers.write_text("Authorization: Bearer s3cret: with a colon \n\nX-Scope:  two\n")
    assert exported(collector.url, headers=headers) == ""
    (span,) = collector.spans
    assert (span.name, span.trace_id, span.span_id) == ("one", bytes(range(16)).hex(), bytes(range(8)).hex())
    assert (span.parent_id, span.state, span.kind) == (b"parent__".hex(), "a=1", 3)
    assert (span.start_ns, span.end_ns, span.events, span.is_error) == (
        1_000,
        2_000,
        {"happened": 1_500},
        True,
    )
    assert span.attributes == {**SPAN.attributes, "error.type": "overloaded"}
    assert collector.paths == ["/v1/traces"]
    (given,) = collector.headers
    assert (given["authorization"], given["x-scope"], given["x-more"]) == (
        "Bearer s3cret: with a colon",
        "two",
        "3",
    )
    (resource,) = collector.resources
    assert resource["service.name"] == "baton-test"
    assert resource["deployment.environment.name"] == "lab"


def test_the_environment_names_the_service(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    assert exported(collector.url + "/v1/traces") == ""
    assert [span.service for span in collector.spans] == ["ours"]
    assert collector.paths == ["/v1/traces"]


def test_a_refusal_is_reported(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    collector.status = 401
    assert "401" in exported(collector.url)
    assert len(collector.paths) == 1


def test_a_collector_that_hangs_is_given_up(collector: OtlpCollector) -> None:
    collector.hangs = True
    assert "timeout" in exported(collector.url)


def test_a_collector_that_is_away_is_reported(collector: OtlpCollector) -> None:
    collector.close()
    assert "Failed to export" in exported(collector.url)


@pytest.mark.parametrize(
    "text", ["hidden", ": hidden", "hidden:", "hiddén: value", "name: hidden\x00", "a: 1\nhidden"]
)
def test_what_is_no_header_is_refused_without_its_value(text: str, tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text(text)
    with pytest.raises(BatonError, match=f"of tracing.otlp_headers_file {path} is not a header") as raised:
        exported("http://127.0.0.1:9", headers=path)
    assert raised.value.kind is ErrorKind.INVALID
    assert "hidd" not in raised.value.message


def test_a_file_of_headers_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match=r"cannot read tracing\.otlp_headers_file"):
        exported("http://127.0.0.1:9", headers=tmp_path / "none")


@pytest.mark.parametrize(
    ("url", "posted"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("http://[::1]:4318/v1/traces", "http://[::1]:4318/v1/traces"),
    ],
)
def test_the_url_that_is_posted_to(url: str, posted: str) -> None:
    assert TracingSettings(otlp_endpoint=url).traces_url == posted


@pytest.mark.parametrize(
    "url",
    [
        "",
        "collector:4318",
        "grpc://c:4317",
        "http://",
        "http://c:port",
        "http://u:secret@c",
        "http://c?k=secret",
        "http://c#x",
    ],
)
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="otlp_endpoint") as raised:
        TracingSettings(otlp_endpoint=url)
    assert "secret" not in str(raised.value)


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "services.common.observability.tracing.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(BatonError, match=r"pip install 'baton-serve\[otel\]'"):
        configured_recorder(TracingSettings(otlp_endpoint="http://c"), "baton-test")


def test_off_by_default_and_then_nothing_is_imported() -> None:
    """Neither process imports it. redis imports OpenTelemetry's metrics wherever they are installed."""
    program = """
import sys
import services.router.__main__, services.router.process, services.worker.__main__
import services.worker.front.process, services.cli.parse, services.cli.up.command, services.cli.demo.command
from services.common.config.router import RouterConfig
from services.common.config.worker import WorkerConfig
from services.common.observability.tracing.configured import configured_recorder
from services.router.lifecycle.request_traces import RequestTraces
for name in services.cli.commands.COMMANDS:
    services.cli.parse.parser_of(name)  # imports the command
router = RouterConfig(model="m", served_model_name="m")
assert RequestTraces.of(router).recorder is None
assert RequestTraces.of(router).arrived({"traceparent": "00-" + 32 * "1" + "-" + 16 * "2" + "-01"}) is None
worker = WorkerConfig(name="w", role="both", model="m")
assert configured_recorder(worker.tracing, "w") is None
heavy = ("opentelemetry.exporter", "opentelemetry.sdk.trace", "opentelemetry.proto", "requests")
print(*(name for name in sys.modules if name.startswith(heavy)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
