"""W3C Trace Context, with the cases of its specification; a context on its way to a worker."""

from __future__ import annotations

import pytest

from baton.v1.types_pb2 import TraceParent
from services.common.observability.tracing.context import (
    TraceContext,
    context_of_headers,
    context_of_message,
    new_trace,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" 00-{TRACE}-{SPAN}-01\t", True),
        (f"00-{TRACE}-{SPAN}-03", True),  # flags that we do not know
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what the future will be like", True),
    ],
)
def test_a_traceparent(given: str, sampled: bool) -> None:
    context = context_of_headers({"traceparent": given})
    assert context == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled)
    assert context.header == f"00-{TRACE}-{SPAN}-0{int(sampled)}"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"ff-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0X",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        "٠" * 55,
    ],
)
def test_what_is_no_traceparent_is_ignored(given: str) -> None:
    assert context_of_headers({"traceparent": given, "tracestate": "a=1"}) is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a=1,b=2", "a=1,b=2"), ("a" * 512, "a" * 512), ("a" * 513, ""), ("a=\n", ""), ("é=1", "")],
)
def test_a_tracestate_is_passed_on_or_dropped(given: str, kept: str) -> None:
    context = context_of_headers({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": given})
    assert context is not None
    assert (context.state, context.child().state) == (kept, kept)


def test_a_child_is_another_span_of_the_same_trace() -> None:
    parent = TraceContext(b"t" * 16, b"s" * 8, sampled=True)
    child = parent.child()
    assert child.trace_id == parent.trace_id
    assert child.sampled
    assert child.span_id not in (parent.span_id, parent.child().span_id)
    assert parent.child(b"x" * 8).span_id == b"x" * 8


def test_the_ratio_decides_by_the_trace_id() -> None:
    assert not any(new_trace(0.0).sampled for _ in range(100))
    assert all(new_trace(1.0).sampled for _ in range(100))
    for _ in range(100):
        context = new_trace(0.5)
        assert context.sampled == (context.trace_id[8] < 128)


def test_a_message_to_a_worker() -> None:
    context = TraceContext(b"t" * 16, b"s" * 8, sampled=True, state="a=1")
    assert context_of_message(context.message()) == context
    for broken in (TraceParent(), TraceParent(trace_id=b"t" * 15, span_id=b"s" * 8)):
        assert context_of_message(broken) is None
