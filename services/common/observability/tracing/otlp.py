"""Export over OTLP/HTTP, by OpenTelemetry's exporter; spans become those of its SDK at the export.

The exporter reads its own environment variables: OTEL_EXPORTER_OTLP_HEADERS, …_CERTIFICATE, …_CLIENT_KEY,
…_CLIENT_CERTIFICATE, …_COMPRESSION and …_TIMEOUT (10 s), which bounds the export of a batch with all its
repetitions; the resource has OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from baton.base.errors import BatonError, ErrorKind
from services.common.config.settings_tree.secret_files import read_secret_file
from services.common.config.tracing import TracingSettings
from services.common.observability.tracing.span import Span

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SCOPE = InstrumentationScope("baton")
_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class OtlpExporter:
    """Sends spans of one process to a collector."""

    def __init__(self, settings: TracingSettings, resource: Mapping[str, str]) -> None:
        """`resource`: attributes of the process. Raises BatonError(INVALID) where the file of headers
        cannot be used."""
        headers = _read_headers(settings.otlp_headers_file)
        self._exporter = OTLPSpanExporter(settings.traces_url, headers=headers)
        named = OTELResourceDetector().detect()  # what the environment states takes precedence
        self._resource = Resource({"telemetry.sdk.language": "python", **resource}).merge(named)
        self._reasons = _Reasons()
        # The recorder logs when exports begin to fail, not each of them.
        logger = logging.getLogger(_LOGGER)
        logger.propagate = False
        logger.handlers = [self._reasons]

    def export(self, spans: Sequence[Span]) -> str:
        """Sends a batch; why that failed, or ""."""
        self._reasons.messages.clear()
        result = self._exporter.export([self._readable(span) for span in spans])
        if result is SpanExportResult.SUCCESS:
            return ""
        return next(iter(self._reasons.messages), "unknown")

    def close(self) -> None:
        """Ends an export that waits to try again."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        own = span.context
        context = _context(own.trace_id, own.span_id, own.state, remote=False)
        parent = span.parent_id and _context(own.trace_id, span.parent_id, own.state, remote=True)
        attributes = dict(span.attributes)
        if span.error:
            attributes["error.type"] = span.error
        return ReadableSpan(
            span.name,
            context,
            parent or None,
            self._resource,
            attributes,
            [Event(event.name, dict(event.attributes), event.at_ns) for event in span.events],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


class _Reasons(logging.Handler):
    """Keeps what the library logs while it exports a batch: it returns no reason of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.messages) < 1:  # the first is the cause
            self.messages.append(record.getMessage())


def _context(trace_id: bytes, span_id: bytes, state: str, *, remote: bool) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([state]) if state else None,
    )


def _read_headers(path: Path | None) -> dict[str, str]:
    """The headers in a file. Raises BatonError(INVALID), whose message has no value."""
    if path is None:
        return {}
    headers = {}
    for number, line in enumerate(read_secret_file(path, "tracing.otlp_headers_file").splitlines(), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        text = name.strip().isascii() and value.isascii() and value.isprintable()
        if not colon or not name.strip() or not value.strip() or not text:
            place = f"line {number} of tracing.otlp_headers_file {path}"
            raise BatonError(ErrorKind.INVALID, f"{place} is not a header `name: value`")
        headers[name.strip().lower()] = value.strip()
    return headers
