"""The span of a slot of a decode worker, from its reservation to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from baton.engine.shared_memory.output_ring import Finish
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.types_pb2 import DraftCounts
from services.common.observability.draft_counts import draft_attributes
from services.common.observability.tracing.context import TraceContext, context_of_message
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.observability.tracing.span import Span, SpanEvent, wall_offset_ns

_NAME = "baton.worker.decode"


@dataclass(slots=True, eq=False)
class SlotSpan:
    """A slot's span while it runs. Times are in nanoseconds of the monotonic clock. `parent`: the router's
    span. `first_ns`: when the slot's first token was read; 0: none was."""

    recorder: SpanRecorder
    parent: TraceContext
    request_id: str
    attempt: int
    input_tokens: int
    reserved_ns: int = field(default_factory=time.monotonic_ns)
    first_ns: int = 0

    @classmethod
    def of(cls, recorder: SpanRecorder | None, request: ReserveRequest) -> SlotSpan | None:
        """Creates the span of a reservation; None if its request is not traced."""
        if recorder is None or not request.HasField("trace"):
            return None
        parent = context_of_message(request.trace)
        if parent is None:
            return None
        attempt = request.attempt
        return cls(recorder, parent, attempt.request_id.hex(), attempt.number, request.token_count)

    def record(self, slot: int, finish: Finish, tokens: int, drafts: DraftCounts) -> None:
        """Records the span of a slot that has ended after `tokens` tokens, by these steps."""
        offset = wall_offset_ns()
        self.recorder.record(
            [
                Span(
                    _NAME,
                    self.parent.child(),
                    self.parent.span_id,
                    offset + self.reserved_ns,
                    offset + time.monotonic_ns(),
                    "server",
                    {
                        "baton.request_id": self.request_id,
                        "baton.attempt": self.attempt,
                        "baton.slot": slot,
                        "baton.finish": finish.name.lower(),
                        "baton.context_tokens": self.input_tokens,
                        "gen_ai.usage.output_tokens": tokens,
                        **draft_attributes(drafts),
                    },
                    [SpanEvent("first_token", offset + self.first_ns)] if self.first_ns else [],
                )
            ]
        )
