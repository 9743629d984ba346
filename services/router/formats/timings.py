"""Durations of a request's stages, as the header `Server-Timing` of HTTP and as trailing metadata of gRPC.

    server-timing: queue;dur=0.1, prefill;dur=24.3, transfer;dur=1.2, decode;dur=310.0

Milliseconds: until a worker began with it, to the first token, from there until decode had its KV cache (what
of the handoff no computation hid), and from there to the end. A stage that was not reached is left out. Where
decode steps verified drafts, `decode` has how many tokens a step gave out on average:

    decode;dur=310.0;desc="1.94 tokens per step"
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.v1.router_pb2 import RequestTrace, Stage
from baton.v1.types_pb2 import DraftCounts
from services.common.observability.draft_counts import add_counts, tokens_per_step

HEADER = "server-timing"
# Name → the stages between which it is.
_SPANS: dict[str, tuple[Stage.ValueType, Stage.ValueType]] = {
    "queue": (Stage.STAGE_UNSPECIFIED, Stage.STAGE_PREFILLING),
    "prefill": (Stage.STAGE_PREFILLING, Stage.STAGE_FIRST_TOKEN),
    "transfer": (Stage.STAGE_FIRST_TOKEN, Stage.STAGE_HANDED_OFF),
    "decode": (Stage.STAGE_HANDED_OFF, Stage.STAGE_ENDED),
}


def spans(trace: RequestTrace) -> dict[str, tuple[float, float]]:
    """Begin and end of each stage that was reached, in milliseconds since the request arrived."""
    reached = {one.stage: one.offset_ns / 1e6 for one in trace.stages} | {Stage.STAGE_UNSPECIFIED: 0.0}
    return {
        name: (reached[since], max(reached[since], reached[until]))
        for name, (since, until) in _SPANS.items()
        if since in reached and until in reached
    }


def server_timing(traces: Iterable[RequestTrace]) -> str:
    """The value for the outputs of one call: of each stage the longest. Empty if no stage was reached."""
    longest: dict[str, float] = {}
    total = DraftCounts()
    for trace in traces:
        add_counts(total, trace.drafts)
        for name, (begin, end) in spans(trace).items():
            longest[name] = max(longest.get(name, 0.0), end - begin)
    described = {"decode": f';desc="{tokens_per_step(total):.2f} tokens per step"'} if total.drafts else {}
    return ", ".join(
        f"{name};dur={longest[name]:.1f}{described.get(name, '')}" for name in _SPANS if name in longest
    )
