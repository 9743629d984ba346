"""The span of a decode slot: one for each reservation that is traced, at its end, however that comes."""

from __future__ import annotations

import pytest

from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.types_pb2 import Attempt, TraceParent
from services.decode.output_streams import OutputStreams
from services.decode.slot_span import SlotSpan
from tests.support.kept_spans import KeptSpans

ROUTER = b"r" * 16
ATTEMPT = Attempt(request_id=b"q" * 16, number=1)
TRACE = TraceParent(trace_id=b"t" * 16, span_id=b"p" * 8)


def reserved(kept: KeptSpans) -> OutputStreams:
    """The streams of a worker, which has reserved slot 3."""
    streams = OutputStreams()
    request = ReserveRequest(attempt=ATTEMPT, token_count=5, trace=TRACE)
    span = SlotSpan.of(kept.recorder, request)
    assert span is not None
    streams.reserve(ATTEMPT, ROUTER, 0, slot=3, generation=9, span=span)
    return streams


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP, Finish.PREEMPTED, Finish.CANCELLED])
def test_a_sequence_that_has_run(finish: Finish) -> None:
    kept = KeptSpans()
    streams = reserved(kept)
    for token in (5, 6):
        streams.emit(Record(3, 9, token, Finish.NONE))
    streams.emit(Record(3, 9, 7, finish))
    streams.end_unused(ATTEMPT)  # too late
    (span,) = kept.all()
    assert (span.name, span.kind, span.error) == ("baton.worker.decode", "server", "")
    assert (span.context.trace_id, span.parent_id) == (b"t" * 16, b"p" * 8)
    assert span.attributes == {
        "baton.request_id": (b"q" * 16).hex(),
        "baton.attempt": 1,
        "baton.slot": 3,
        "baton.finish": finish.name.lower(),
        "baton.context_tokens": 5,
        "gen_ai.usage.output_tokens": 3 if finish in (Finish.LENGTH, Finish.STOP) else 2,
    }
    (first,) = span.events
    assert span.start_ns <= first.at_ns <= span.end_ns


def test_a_reservation_that_was_never_used() -> None:
    kept = KeptSpans()
    reserved(kept).end_unused(ATTEMPT)
    (span,) = kept.all()
    assert (span.attributes["baton.finish"], span.attributes["gen_ai.usage.output_tokens"]) == (
        "cancelled",
        0,
    )
    assert span.events == []


def test_what_is_not_traced_has_no_span() -> None:
    kept = KeptSpans()
    assert SlotSpan.of(kept.recorder, ReserveRequest(attempt=ATTEMPT)) is None
    broken = ReserveRequest(attempt=ATTEMPT, trace=TraceParent(trace_id=b"t"))
    assert SlotSpan.of(kept.recorder, broken) is None
    assert SlotSpan.of(None, ReserveRequest(attempt=ATTEMPT, trace=TRACE)) is None
    assert kept.all() == []
