"""W3C Trace Context: which span of which trace a call belongs to, in headers and in messages to workers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from baton.v1.types_pb2 import TraceParent

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
# A header of version 00; a later version may have more behind it.
_TRACEPARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION = "ff"
_SAMPLED = 0x01
# What the specification has everyone pass on at least; more is dropped.
_MOST_STATE = 512
_STATE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span as others refer to it. `sampled`: whether it is recorded. `state`: what tracing systems pass on
    about the trace, as the client sent it."""

    trace_id: bytes
    span_id: bytes
    sampled: bool
    state: str = ""

    @property
    def header(self) -> str:
        """The value of `traceparent` and `traceresponse`."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{_SAMPLED * self.sampled:02x}"

    def child(self, span_id: bytes | None = None) -> TraceContext:
        """A span of the same trace, with a random id unless one is given."""
        return TraceContext(self.trace_id, span_id or random_id(), self.sampled, self.state)

    def message(self) -> TraceParent:
        """The context as it is sent to workers."""
        return TraceParent(trace_id=self.trace_id, span_id=self.span_id, state=self.state)


def random_id() -> bytes:
    """The id of a span."""
    return secrets.token_bytes(SPAN_ID_BYTES)


def new_trace(ratio: float) -> TraceContext:
    """A span that begins a trace; it is sampled with probability `ratio`, in dependence of the trace's id as
    OpenTelemetry's TraceIdRatioBased does."""
    trace_id = secrets.token_bytes(TRACE_ID_BYTES)
    sampled = int.from_bytes(trace_id[8:], "big") < round(ratio * 2**64)
    return TraceContext(trace_id, random_id(), sampled)


def context_of_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """The client's span; None where it sends none, or one that does not follow the specification."""
    found = _TRACEPARENT.fullmatch(headers.get(TRACEPARENT, "").strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    zeros = not int(trace_id, 16) or not int(span_id, 16)
    if version == _INVALID_VERSION or zeros or (version == "00" and rest):
        return None
    state = headers.get(TRACESTATE, "").strip(" \t")
    if len(state) > _MOST_STATE or not _STATE.fullmatch(state):
        state = ""
    sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), sampled, state)


def context_of_message(message: TraceParent) -> TraceContext | None:
    """The router's span that a worker's call belongs to; None where it is not traced."""
    if len(message.trace_id) != TRACE_ID_BYTES or len(message.span_id) != SPAN_ID_BYTES:
        return None
    return TraceContext(message.trace_id, message.span_id, sampled=True, state=message.state)
