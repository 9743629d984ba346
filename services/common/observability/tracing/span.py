"""A span that has ended: a name, an interval, ids and counts. It never has content of prompts or outputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.common.observability.tracing.context import TraceContext

Kind = Literal["server", "client", "internal"]
AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event at one time within a span, in wall clock nanoseconds."""

    name: str
    at_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Times are in wall clock nanoseconds. `parent_id`: None for the first span of a trace. `error`: the kind
    of error that ended it, empty where none did."""

    name: str
    context: TraceContext
    parent_id: bytes | None
    start_ns: int
    end_ns: int
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str = ""


def wall_offset_ns() -> int:
    """Nanoseconds to add to a monotonic time of this host for the wall clock time, as of now. Times of one
    span, or of several that are compared, are converted with one offset."""
    return time.time_ns() - time.monotonic_ns()
