"""Spans of client calls and their requests, made once they have ended, of the times in their timelines.

    baton.request                       one client call, from its arrival to the end of its last output
      ├─ baton.admission                parsed, checked, tokenised
      ├─ baton.queue                    waiting for a pair of workers
      ├─ baton.reserve                  from then until decode has reserved
      ├─ baton.prefill                  from the Prefill call to the first token
      ├─ baton.handoff                  from there until decode has the KV
      └─ baton.decode                   from there to the end

With several outputs each has its own stages. Attributes are ids, counts and parameters, never content; names
are those of OpenTelemetry's conventions for generative AI where it has one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import RequestTrace, Usage
from services.common.config.router import RouterConfig
from services.common.observability.draft_counts import draft_attributes
from services.common.observability.tracing.configured import configured_recorder
from services.common.observability.tracing.context import context_of_headers, new_trace
from services.common.observability.tracing.recorder import SpanRecorder
from services.common.observability.tracing.span import AttributeValue, Span, SpanEvent
from services.router.lifecycle.timeline import RequestTimeline
from services.router.request.call_trace import CallTrace
from services.router.request.request import ClientCall, Request

# By route; any other is a conversation.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/baton.v1.RouterService/Generate": "generate_content",
}
# The stages in which a request waits for a call to a worker.
_CALLS = ("reserve", "prefill")
_LAST_SPANS_S = 1.0


@dataclass(slots=True)
class _Ended:
    """Usage of a call's requests that have ended."""

    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)


@dataclass
class RequestTraces:
    """The traces of one router. `recorder`: None where traces are off. `ratio`: the share of calls that are
    sampled among those whose client does not say. `model`: the name of the served model."""

    recorder: SpanRecorder | None = None
    ratio: float = 1.0
    model: str = ""
    # Of sampled calls that run.
    _running: dict[CallTrace, _Ended] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: RouterConfig) -> RequestTraces:
        """Creates the recorder that the configuration asks for. Raises BatonError(INVALID) if it cannot be
        used."""
        instance = "" if config.member is None else f"router-{config.member.index}"
        recorder = configured_recorder(config.tracing, "baton-router", instance)
        return cls(recorder, config.tracing.sample_ratio, config.served_model_name)

    def close(self) -> None:
        """Exports what is left, for a short time. Blocks."""
        if self.recorder is not None:
            self.recorder.close(_LAST_SPANS_S)

    def arrived(self, headers: Mapping[str, str]) -> CallTrace | None:
        """The trace of a call with these headers or metadata; None where traces are off."""
        if self.recorder is None:
            return None
        client = context_of_headers(headers)
        if client is None:
            return CallTrace(new_trace(self.ratio), None)
        return CallTrace(client.child(), client.span_id)

    @contextlib.contextmanager
    def running(self, requests: Sequence[Request]) -> Iterator[None]:
        """Context manager that is open while the requests of one call run; records the call's span at the
        end."""
        error = ""
        if (trace := requests[0].trace) is not None:
            self._running[trace] = _Ended()
        try:
            yield
        except BatonError as failure:
            error = failure.kind.name.lower()
            raise
        except Exception:
            error = ErrorKind.INTERNAL.name.lower()
            raise
        finally:
            self.call_ended(requests, requests[0].call, error)

    def request_ended(
        self,
        request: Request,
        outcome: str,
        error: str,
        usage: Usage,
        trace: RequestTrace,
        timeline: RequestTimeline,
    ) -> None:
        """Records the stages of a request. `outcome`: why it ended; `error`: the same where it failed."""
        call = request.trace
        if call is None or self.recorder is None:
            return
        offset = call.offset_ns + request.arrived_ns
        self.recorder.record(_stages(request, call, timeline, offset, error))
        if (ended := self._running.get(call)) is None:
            return
        ended.completion_tokens += usage.completion_tokens
        ended.cached_tokens += usage.cached_tokens if request.choice == 0 else 0
        ended.finish_reasons.append(outcome)
        ended.attributes = {
            "baton.request_id": request.id.hex(),
            "baton.attempts": trace.attempts,
            "baton.prefill_worker": trace.prefill_worker,
            "baton.decode_worker": trace.decode_worker,
            "baton.kv_bytes_shipped": trace.kv_bytes_shipped,
        }
        if (first := timeline.latencies_s(usage.completion_tokens).get("ttft")) is not None:
            ended.attributes["gen_ai.response.time_to_first_chunk"] = first
        ended.events += [
            SpanEvent("attempt_failed", offset + at, {"error.type": kind}) for at, kind in timeline.failures
        ]

    def call_ended(self, requests: Sequence[Request], call: ClientCall, error: str) -> None:
        """Records the span of a call, once: its requests have ended, or there are none since it was
        refused."""
        trace = call.trace
        if trace is None or self.recorder is None or trace.ended:
            return
        trace.ended = True
        ended = self._running.pop(trace, None) or _Ended()
        if not trace.context.sampled:
            return
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _OPERATIONS.get(call.route, "chat"),
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": self.model,
            "baton.route": call.route,
        }
        if call.tenant_name:
            attributes["baton.tenant"] = call.tenant_name
        if requests:
            attributes |= _parameters(requests) | self._usage(requests, ended) | ended.attributes
        span = Span(
            "baton.request",
            trace.context,
            trace.parent_id,
            trace.offset_ns + trace.arrived_ns,
            trace.offset_ns + time.monotonic_ns(),
            "server",
            attributes,
            ended.events,
            error,
        )
        self.recorder.record([span])

    def _usage(self, requests: Sequence[Request], ended: _Ended) -> dict[str, AttributeValue]:
        return {
            "gen_ai.response.model": self.model,
            "gen_ai.response.finish_reasons": ended.finish_reasons,
            "gen_ai.usage.input_tokens": sum(len(one.prompt_ids) for one in requests if one.choice == 0),
            "gen_ai.usage.output_tokens": ended.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        }


def _stages(
    request: Request, call: CallTrace, timeline: RequestTimeline, offset: int, error: str
) -> list[Span]:
    """The spans of a request's stages. `offset`: its arrival on the wall clock. The stage in which a request
    failed has the error."""
    now = time.monotonic_ns() - request.arrived_ns
    drafts = draft_attributes(timeline.drafts)
    spans = []
    for stage, (since, ended) in timeline.intervals_ns().items():
        until = now if ended is None else ended
        # Without an error an output that the first token ended was never handed off.
        if until < since or (stage == "handoff" and ended is None and not error):
            continue
        spans.append(
            Span(
                f"baton.{stage}",
                call.stage_context(request.id, stage),
                call.context.span_id,
                offset + since,
                offset + until,
                "client" if stage in _CALLS else "internal",
                {"baton.request_id": request.id.hex(), **(drafts if stage == "decode" else {})},
                error=error if ended is None else "",
            )
        )
    return spans


def _parameters(requests: Sequence[Request]) -> dict[str, AttributeValue]:
    """The parameters that the client asked for, as attributes."""
    sampling = requests[0].sampling
    parameters: dict[str, AttributeValue] = {
        "gen_ai.request.max_tokens": requests[0].max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if len(requests) > 1:
        parameters["gen_ai.request.choice.count"] = len(requests)
    return parameters
