"""A collector of OTLP over HTTP on loopback, which decodes what it is sent; it can refuse or hang."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, and the process that sent it. Ids are in hex; times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    is_error: bool


class OtlpCollector:
    """Spans that were received since the start. `status`: the answer's status. `hangs`: it answers nothing
    until it is closed."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = False
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self.spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def wait_for(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        """Waits until the condition holds, which is asked after each request."""
        with self._changed:
            assert self._changed.wait_for(condition, within_s), (
                f"not within {within_s} s: {[(span.service, span.name) for span in self.spans]}"
            )

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> int | None:
        """Takes a request; the status to answer, None where the connection is to be dropped."""
        with self._changed:
            self.paths.append(path)
            self.headers.append(headers)
            self._changed.notify_all()
        if self.hangs:
            self._closed.wait(120)
            return None
        with self._changed:
            if self.status == 200:
                self.bodies.append(body)
                self._decode(ExportTraceServiceRequest.FromString(body))
            self._changed.notify_all()
        return self.status

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _decode(self, request: ExportTraceServiceRequest) -> None:
        for one in request.resource_spans:
            resource = {each.key: value_of(each.value) for each in one.resource.attributes}
            self.resources.append(resource)
            for scope in one.scope_spans:
                assert scope.scope.name == "baton"
                self.spans += [
                    ReceivedSpan(
                        service=resource["service.name"],
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        state=span.trace_state,
                        kind=span.kind,
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes={each.key: value_of(each.value) for each in span.attributes},
                        events={event.name: event.time_unix_nano for event in span.events},
                        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                    for span in scope.spans
                ]


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def otlp_collector() -> Iterator[OtlpCollector]:
    collector = OtlpCollector()
    try:
        yield collector
    finally:
        collector.close()


def _handler(collector: OtlpCollector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = collector.receive(self.path, headers, body)
            if status is None:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
