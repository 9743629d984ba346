"""Spans of one Prefill call, made once it has ended.

baton.worker.prefill                the call
  ├─ baton.worker.prefill.queue     until its first step began
  ├─ baton.worker.prefill.compute   the steps of the prompt
  └─ baton.worker.prefill.transfer  from the first blocks until decode has acknowledged the last
"""

from __future__ import annotations

import time

from baton.v1.engine_pb2 import PrefillEndedEvent
from baton.v1.prefill_pb2 import HandedOff, PrefillRequest, PrefillResponse
from services.common.observability.tracing.context import TraceContext, context_of_message
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.observability.tracing.span import AttributeValue, Span, SpanEvent, wall_offset_ns

_NAME = "baton.worker.prefill"
_LOCAL = "local"


class CallSpans:
    """Times of one call for its spans, in nanoseconds of the monotonic clock."""

    def __init__(self, recorder: SpanRecorder, parent: TraceContext, request: PrefillRequest) -> None:
        """`parent`: the router's span."""
        self._recorder = recorder
        self._parent = parent
        self._context = parent.child()
        self._received_ns = time.monotonic_ns()
        self._first_token_ns = 0
        self._attributes: dict[str, AttributeValue] = {
            "baton.request_id": request.attempt.request_id.hex(),
            "baton.attempt": request.attempt.number,
            "gen_ai.usage.input_tokens": len(request.token_ids),
        }
        self._handed_off = HandedOff()
        self._times = PrefillEndedEvent()
        # The kind of error that ended the call.
        self.error = ""

    @classmethod
    def of(cls, recorder: SpanRecorder | None, request: PrefillRequest) -> CallSpans | None:
        """Creates the spans of a call; None if it is not traced."""
        if recorder is None or not request.HasField("trace"):
            return None
        parent = context_of_message(request.trace)
        return None if parent is None else cls(recorder, parent, request)

    def sent(self, response: PrefillResponse) -> None:
        """Takes note of a response."""
        if response.HasField("first_token"):
            self._first_token_ns = time.monotonic_ns()
            self._attributes["gen_ai.usage.cache_read.input_tokens"] = response.first_token.cached_tokens
        elif response.HasField("handed_off"):
            self._handed_off = response.handed_off

    def ended(self, times: PrefillEndedEvent) -> None:
        """Records the spans of a call that the engine has ended without an error."""
        self._times = times

    def record(self, *, finished: bool) -> None:
        """Records the spans; the call has ended. `finished`: not because the router cancelled it."""
        now, offset, times = time.monotonic_ns(), wall_offset_ns(), self._times
        first = self._first_token_ns
        events = [SpanEvent("first_token", offset + first)] if first else []
        spans = [
            Span(
                _NAME,
                self._context,
                self._parent.span_id,
                offset + self._received_ns,
                offset + now,
                "server",
                self._attributes,
                events,
                self.error or ("" if finished else "cancelled"),
            )
        ]
        stages: list[tuple[str, int, int, dict[str, AttributeValue]]] = []
        if times.started_ns:
            started = max(times.started_ns, self._received_ns)
            stages += [
                ("queue", self._received_ns, started, {}),
                ("compute", started, max(started, times.computed_ns), {}),
            ]
        handed_off = self._handed_off
        if times.shipped_ns and handed_off.transport not in ("", _LOCAL):
            shipped: dict[str, AttributeValue] = {
                "baton.transport": handed_off.transport,
                "baton.kv_bytes_shipped": handed_off.bytes_shipped,
                "baton.exposed_s": handed_off.exposed_ns / 1e9,
            }
            stages.append(("transfer", max(times.shipped_ns, self._received_ns), now, shipped))
        spans += [
            Span(
                f"{_NAME}.{stage}",
                self._context.child(),
                self._context.span_id,
                offset + since,
                offset + until,
                attributes=attributes,
            )
            for stage, since, until, attributes in stages
        ]
        self._recorder.record(spans)
