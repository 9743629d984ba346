"""Counts and latencies of this router's requests, as plain numbers.

Updated when a request delivers tokens or ends; `observability` reads them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.base.errors import ErrorKind
from baton.v1.router_pb2 import RequestTrace, Usage
from services.common.config.router import RouterConfig
from services.common.observability.audit_chain import AuditRecord
from services.common.observability.audit_log import AuditLog
from services.common.observability.histogram import Histogram, tokens_histogram
from services.common.observability.logs import get_log
from services.router.lifecycle.request_traces import RequestTraces
from services.router.lifecycle.timeline import RequestTimeline
from services.router.request.request import ClientCall, Finish, Request

# The outcome of a request whose client disconnected or cancelled.
CANCELLED = "cancelled"
# What requests with limits may have missed.
_MISSED = ("none", "ttft", "tpot", "both", "failed")
_NOT_ERRORS = (*(finish.name.lower() for finish in Finish), CANCELLED)

# The stages that a request's time is divided into, and the latencies that its client sees.
STAGES = ("admission", "queue", "reserve", "prefill", "handoff", "decode")
LATENCIES = ("ttft", "tpot", "itl", "e2e")

_log = get_log("request")


def _seconds(names: tuple[str, ...]) -> dict[str, Histogram]:
    return {name: Histogram() for name in names}


@dataclass
class Observations:
    """The observations of one router. All counts are since its start. `audit`: where each request's end or
    refusal is recorded; `model`: the name of the served model there. `traces`: where its spans are."""

    audit: AuditLog = field(default_factory=AuditLog)
    model: str = ""
    traces: RequestTraces = field(default_factory=RequestTraces)
    stages: dict[str, Histogram] = field(default_factory=lambda: _seconds(STAGES))
    latencies: dict[str, Histogram] = field(default_factory=lambda: _seconds(LATENCIES))
    prompt_lengths: Histogram = field(default_factory=tokens_histogram)
    completion_lengths: Histogram = field(default_factory=tokens_histogram)
    # By finish reason or kind of error; includes requests that were not admitted.
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_NOT_ERRORS, 0)))
    # Of requests that stated limits: by what they missed (`Slo.missed`), or failed.
    limits: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_MISSED, 0)))
    errors: int = 0
    attempts: int = 0
    failed_attempts: Counter[str] = field(default_factory=Counter)
    # Totals of requests that ran. Output counts as it is delivered, the prompt when the request ends.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    batches: int = 0

    @classmethod
    def of(cls, config: RouterConfig, audit: AuditLog) -> Observations:
        """Creates the observers that the configuration asks for. Raises BatonError(INVALID) if traces cannot
        be exported as it says."""
        return cls(audit, config.served_model_name, RequestTraces.of(config))

    def close(self) -> None:
        """Writes and sends what is left, for a short time. Blocks."""
        self.audit.close()
        self.traces.close()

    def delivered(self, tokens: int, gap_ns: int | None) -> None:
        """Records a batch of tokens that goes to a client, `gap_ns` after the batch before it."""
        self.batches += 1
        self.completion_tokens += tokens
        if gap_ns is not None:
            self.latencies["itl"].observe(gap_ns / 1e9)

    def attempt_failed(self, kind: ErrorKind) -> None:
        """Counts an attempt that failed; another one may follow."""
        self.failed_attempts[kind.name.lower()] += 1

    def refused(self, kind: ErrorKind, call: ClientCall) -> None:
        """Counts a request that was not admitted."""
        self.audit.record(
            AuditRecord("refused", kind.name.lower(), call.key_id, call.tenant_name, route=call.route)
        )
        self.outcomes[kind.name.lower()] += 1
        self.errors += 1
        self.traces.call_ended((), call, kind.name.lower())

    def ended(
        self, request: Request, outcome: str, usage: Usage, trace: RequestTrace, timeline: RequestTimeline
    ) -> None:
        """Counts and logs a request that ran: ids, counts and times, no content.

        `outcome`: a finish reason or kind of error in lower case, or CANCELLED.
        """
        stages, latencies = timeline.stages_s(), timeline.latencies_s(usage.completion_tokens)
        for name, seconds in stages.items():
            self.stages[name].observe(seconds)
        for name, seconds in latencies.items():
            self.latencies[name].observe(seconds)
        self.prompt_lengths.observe(usage.prompt_tokens)
        self.completion_lengths.observe(usage.completion_tokens)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.outcomes[outcome] += 1
        self.errors += outcome not in _NOT_ERRORS
        if request.slo is not None and outcome != CANCELLED:
            self.limits["failed" if outcome not in _NOT_ERRORS else request.slo.missed(latencies)] += 1
        self.attempts += trace.attempts
        self._record(request, outcome, usage)
        error = "" if outcome in _NOT_ERRORS else outcome
        self.traces.request_ended(request, outcome, error, usage, trace, timeline)
        milliseconds = {f"{name}_ms": round(s * 1e3, 3) for name, s in (stages | latencies).items()}
        _log.info(
            "request_ended",
            request=request.id.hex(),
            outcome=outcome,
            stage=timeline.last_stage,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            attempts=trace.attempts,
            prefill=trace.prefill_worker,
            decode=trace.decode_worker,
            kv_bytes=trace.kv_bytes_shipped,
            **milliseconds,
        )

    def _record(self, request: Request, outcome: str, usage: Usage) -> None:
        call = request.call
        self.audit.record(
            AuditRecord(
                "request",
                outcome,
                call.key_id,
                call.tenant_name,
                request.id.hex(),
                self.model,
                call.route,
                usage.prompt_tokens,
                usage.completion_tokens,
            )
        )
