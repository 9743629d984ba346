"""The trace of one client call: its root span until that ends, and the ids that spans in workers refer to."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass, field

from services.common.observability.tracing.context import SPAN_ID_BYTES, TraceContext
from services.common.observability.tracing.span import wall_offset_ns


@dataclass(eq=False)
class CallTrace:
    """The trace of one call. `context`: of the root span. `parent_id`: the client's span. `arrived_ns`: by
    the monotonic clock. `offset_ns`: what makes its times those of the wall clock, the same for all spans."""

    context: TraceContext
    parent_id: bytes | None
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    offset_ns: int = field(default_factory=wall_offset_ns)
    ended: bool = False

    @property
    def header_of_ended(self) -> str:
        """The `traceresponse` of a call that has failed. Its flag says whether the span is recorded: not
        where the call was refused before it was read, since then `RequestTraces` did not see it end."""
        context = self.context
        return dataclasses.replace(context, sampled=context.sampled and self.ended).header

    def stage_context(self, request_id: bytes, stage: str) -> TraceContext:
        """The span of a stage of one of the call's requests. Its id follows from the request's, so that it is
        known before the span is made, which is when it has ended."""
        key = stage.encode()
        return self.context.child(hashlib.blake2b(request_id, key=key, digest_size=SPAN_ID_BYTES).digest())
